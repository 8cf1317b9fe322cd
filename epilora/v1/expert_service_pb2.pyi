from epilora.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TopK(_message.Message):
    __slots__ = ("expert_ids", "weights")
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    expert_ids: _types_pb2.Tensor
    weights: _types_pb2.Tensor
    def __init__(self, expert_ids: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., weights: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("request_id", "layer", "hidden_states", "top_k", "adapter_names", "adapter_index", "routed_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROUTED_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    layer: int
    hidden_states: _types_pb2.Tensor
    top_k: TopK
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    adapter_index: _containers.RepeatedScalarFieldContainer[int]
    routed_only: bool
    def __init__(self, request_id: _Optional[int] = ..., layer: _Optional[int] = ..., hidden_states: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., top_k: _Optional[_Union[TopK, _Mapping]] = ..., adapter_names: _Optional[_Iterable[str]] = ..., adapter_index: _Optional[_Iterable[int]] = ..., routed_only: _Optional[bool] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("request_id", "hidden_states")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    hidden_states: _types_pb2.Tensor
    def __init__(self, request_id: _Optional[int] = ..., hidden_states: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...
