import datetime

from epilora.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source", "allow_partial", "layout_hints")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HINTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    allow_partial: bool
    layout_hints: _types_pb2.LayoutHints
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., allow_partial: _Optional[bool] = ..., layout_hints: _Optional[_Union[_types_pb2.LayoutHints, _Mapping]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "drain_timeout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    drain_timeout: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., drain_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("freed_bytes", "num_requests_cancelled")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    num_requests_cancelled: int
    def __init__(self, freed_bytes: _Optional[int] = ..., num_requests_cancelled: _Optional[int] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "state")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    state: _types_pb2.AdapterState
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.AdapterState, str]] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Adapter]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[_types_pb2.Adapter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WatchAdapterResponse(_message.Message):
    __slots__ = ("adapter", "bytes_done", "bytes_total")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    bytes_done: int
    bytes_total: int
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...
