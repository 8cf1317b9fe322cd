import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]

class AdapterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_STATE_UNSPECIFIED: _ClassVar[AdapterState]
    ADAPTER_STATE_LOADING: _ClassVar[AdapterState]
    ADAPTER_STATE_STAGED: _ClassVar[AdapterState]
    ADAPTER_STATE_SERVING: _ClassVar[AdapterState]
    ADAPTER_STATE_DRAINING: _ClassVar[AdapterState]
    ADAPTER_STATE_FAILED: _ClassVar[AdapterState]
    ADAPTER_STATE_UNLOADED: _ClassVar[AdapterState]

class ParameterOrientation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARAMETER_ORIENTATION_UNSPECIFIED: _ClassVar[ParameterOrientation]
    PARAMETER_ORIENTATION_PLAIN: _ClassVar[ParameterOrientation]
    PARAMETER_ORIENTATION_SWAPPED: _ClassVar[ParameterOrientation]

class GateUpLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATE_UP_LAYOUT_UNSPECIFIED: _ClassVar[GateUpLayout]
    GATE_UP_LAYOUT_CONCATENATED: _ClassVar[GateUpLayout]
    GATE_UP_LAYOUT_INTERLEAVED: _ClassVar[GateUpLayout]
    GATE_UP_LAYOUT_NOT_GATED: _ClassVar[GateUpLayout]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
ADAPTER_STATE_UNSPECIFIED: AdapterState
ADAPTER_STATE_LOADING: AdapterState
ADAPTER_STATE_STAGED: AdapterState
ADAPTER_STATE_SERVING: AdapterState
ADAPTER_STATE_DRAINING: AdapterState
ADAPTER_STATE_FAILED: AdapterState
ADAPTER_STATE_UNLOADED: AdapterState
PARAMETER_ORIENTATION_UNSPECIFIED: ParameterOrientation
PARAMETER_ORIENTATION_PLAIN: ParameterOrientation
PARAMETER_ORIENTATION_SWAPPED: ParameterOrientation
GATE_UP_LAYOUT_UNSPECIFIED: GateUpLayout
GATE_UP_LAYOUT_CONCATENATED: GateUpLayout
GATE_UP_LAYOUT_INTERLEAVED: GateUpLayout
GATE_UP_LAYOUT_NOT_GATED: GateUpLayout

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "source", "generation", "digest", "state", "failure", "adapter_slot", "serving_since", "num_requests_in_flight", "resident_bytes", "report")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOT_FIELD_NUMBER: _ClassVar[int]
    SERVING_SINCE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    generation: int
    digest: str
    state: AdapterState
    failure: AdapterFailure
    adapter_slot: int
    serving_since: _timestamp_pb2.Timestamp
    num_requests_in_flight: int
    resident_bytes: int
    report: AdapterLoadReport
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., generation: _Optional[int] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[AdapterState, str]] = ..., failure: _Optional[_Union[AdapterFailure, _Mapping]] = ..., adapter_slot: _Optional[int] = ..., serving_since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., num_requests_in_flight: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., report: _Optional[_Union[AdapterLoadReport, _Mapping]] = ...) -> None: ...

class AdapterFailure(_message.Message):
    __slots__ = ("code", "reason", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class AdapterLoadReport(_message.Message):
    __slots__ = ("expert_layout", "producer", "num_tensors", "num_tensors_used", "ignored_tensors", "expert_coverage", "dense_modules", "warnings", "file_bytes", "bytes_read", "cache_hit", "min_lora_rank", "max_lora_rank", "file_dtype", "rank_differences", "saved_modules", "base_model")
    EXPERT_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    NUM_TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUM_TENSORS_USED_FIELD_NUMBER: _ClassVar[int]
    IGNORED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    DENSE_MODULES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    MIN_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    FILE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    RANK_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    SAVED_MODULES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    expert_layout: str
    producer: str
    num_tensors: int
    num_tensors_used: int
    ignored_tensors: _containers.RepeatedScalarFieldContainer[str]
    expert_coverage: _containers.RepeatedCompositeFieldContainer[ExpertCoverage]
    dense_modules: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    file_bytes: int
    bytes_read: int
    cache_hit: bool
    min_lora_rank: int
    max_lora_rank: int
    file_dtype: str
    rank_differences: _containers.RepeatedScalarFieldContainer[str]
    saved_modules: _containers.RepeatedScalarFieldContainer[str]
    base_model: str
    def __init__(self, expert_layout: _Optional[str] = ..., producer: _Optional[str] = ..., num_tensors: _Optional[int] = ..., num_tensors_used: _Optional[int] = ..., ignored_tensors: _Optional[_Iterable[str]] = ..., expert_coverage: _Optional[_Iterable[_Union[ExpertCoverage, _Mapping]]] = ..., dense_modules: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., file_bytes: _Optional[int] = ..., bytes_read: _Optional[int] = ..., cache_hit: _Optional[bool] = ..., min_lora_rank: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., file_dtype: _Optional[str] = ..., rank_differences: _Optional[_Iterable[str]] = ..., saved_modules: _Optional[_Iterable[str]] = ..., base_model: _Optional[str] = ...) -> None: ...

class LayoutHints(_message.Message):
    __slots__ = ("orientation", "expert_rank_from_shape", "stacked_parameters")
    ORIENTATION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RANK_FROM_SHAPE_FIELD_NUMBER: _ClassVar[int]
    STACKED_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    orientation: ParameterOrientation
    expert_rank_from_shape: bool
    stacked_parameters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, orientation: _Optional[_Union[ParameterOrientation, str]] = ..., expert_rank_from_shape: _Optional[bool] = ..., stacked_parameters: _Optional[_Iterable[str]] = ...) -> None: ...

class ExpertCoverage(_message.Message):
    __slots__ = ("layer", "projection", "num_experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    projection: str
    num_experts: int
    def __init__(self, layer: _Optional[int] = ..., projection: _Optional[str] = ..., num_experts: _Optional[int] = ...) -> None: ...

class MoEEPLoadSpec(_message.Message):
    __slots__ = ("model_digest", "placement_id", "ep_rank", "num_ep_ranks", "expert_tp_rank", "num_expert_tp_ranks", "layers")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_EP_RANKS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_TP_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_TP_RANKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    placement_id: str
    ep_rank: int
    num_ep_ranks: int
    expert_tp_rank: int
    num_expert_tp_ranks: int
    layers: _containers.RepeatedCompositeFieldContainer[MoELayerLoadSpec]
    def __init__(self, model_digest: _Optional[str] = ..., placement_id: _Optional[str] = ..., ep_rank: _Optional[int] = ..., num_ep_ranks: _Optional[int] = ..., expert_tp_rank: _Optional[int] = ..., num_expert_tp_ranks: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[MoELayerLoadSpec, _Mapping]]] = ...) -> None: ...

class MoELayerLoadSpec(_message.Message):
    __slots__ = ("layer", "local_experts", "num_experts", "hidden_size", "intermediate_size", "gate_up_layout", "module")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    GATE_UP_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    local_experts: _containers.RepeatedScalarFieldContainer[int]
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate_up_layout: GateUpLayout
    module: str
    def __init__(self, layer: _Optional[int] = ..., local_experts: _Optional[_Iterable[int]] = ..., num_experts: _Optional[int] = ..., hidden_size: _Optional[int] = ..., intermediate_size: _Optional[int] = ..., gate_up_layout: _Optional[_Union[GateUpLayout, str]] = ..., module: _Optional[str] = ...) -> None: ...

class DenseModule(_message.Message):
    __slots__ = ("module", "in_features", "out_features")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    module: str
    in_features: int
    out_features: int
    def __init__(self, module: _Optional[str] = ..., in_features: _Optional[int] = ..., out_features: _Optional[int] = ...) -> None: ...
