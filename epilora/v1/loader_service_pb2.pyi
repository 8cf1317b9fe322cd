from epilora.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BuildSlicesRequest(_message.Message):
    __slots__ = ("source", "load_specs", "dense_modules", "allow_partial", "model_type", "layout_hints")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_SPECS_FIELD_NUMBER: _ClassVar[int]
    DENSE_MODULES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HINTS_FIELD_NUMBER: _ClassVar[int]
    source: str
    load_specs: _containers.RepeatedCompositeFieldContainer[_types_pb2.MoEEPLoadSpec]
    dense_modules: _containers.RepeatedCompositeFieldContainer[_types_pb2.DenseModule]
    allow_partial: bool
    model_type: str
    layout_hints: _types_pb2.LayoutHints
    def __init__(self, source: _Optional[str] = ..., load_specs: _Optional[_Iterable[_Union[_types_pb2.MoEEPLoadSpec, _Mapping]]] = ..., dense_modules: _Optional[_Iterable[_Union[_types_pb2.DenseModule, _Mapping]]] = ..., allow_partial: _Optional[bool] = ..., model_type: _Optional[str] = ..., layout_hints: _Optional[_Union[_types_pb2.LayoutHints, _Mapping]] = ...) -> None: ...

class BuildSlicesResponse(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: BuildProgress
    result: BuildResult
    def __init__(self, progress: _Optional[_Union[BuildProgress, _Mapping]] = ..., result: _Optional[_Union[BuildResult, _Mapping]] = ...) -> None: ...

class BuildProgress(_message.Message):
    __slots__ = ("bytes_done", "bytes_total")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class BuildResult(_message.Message):
    __slots__ = ("lease_id", "adapter_digest", "slices", "report", "pinned_source")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PINNED_SOURCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    adapter_digest: str
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    report: _types_pb2.AdapterLoadReport
    pinned_source: str
    def __init__(self, lease_id: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., report: _Optional[_Union[_types_pb2.AdapterLoadReport, _Mapping]] = ..., pinned_source: _Optional[str] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("ep_rank", "placement_id", "path", "size_bytes", "tensor_bytes", "digest")
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ep_rank: int
    placement_id: str
    path: str
    size_bytes: int
    tensor_bytes: int
    digest: str
    def __init__(self, ep_rank: _Optional[int] = ..., placement_id: _Optional[str] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., tensor_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ReleaseSlicesRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseSlicesResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCacheResponse(_message.Message):
    __slots__ = ("num_entries", "used_bytes", "budget_bytes", "num_builds", "num_leases", "instance_id", "num_redis_pulls", "num_redis_pushes", "num_redis_losses", "num_redis_errors")
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BUILDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REDIS_PULLS_FIELD_NUMBER: _ClassVar[int]
    NUM_REDIS_PUSHES_FIELD_NUMBER: _ClassVar[int]
    NUM_REDIS_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_REDIS_ERRORS_FIELD_NUMBER: _ClassVar[int]
    num_entries: int
    used_bytes: int
    budget_bytes: int
    num_builds: int
    num_leases: int
    instance_id: str
    num_redis_pulls: int
    num_redis_pushes: int
    num_redis_losses: int
    num_redis_errors: int
    def __init__(self, num_entries: _Optional[int] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., num_builds: _Optional[int] = ..., num_leases: _Optional[int] = ..., instance_id: _Optional[str] = ..., num_redis_pulls: _Optional[int] = ..., num_redis_pushes: _Optional[int] = ..., num_redis_losses: _Optional[int] = ..., num_redis_errors: _Optional[int] = ...) -> None: ...

class VerifyCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyCacheResponse(_message.Message):
    __slots__ = ("num_slices", "num_bytes", "damaged_paths")
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_PATHS_FIELD_NUMBER: _ClassVar[int]
    num_slices: int
    num_bytes: int
    damaged_paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_slices: _Optional[int] = ..., num_bytes: _Optional[int] = ..., damaged_paths: _Optional[_Iterable[str]] = ...) -> None: ...
