from epilora.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group_id", "model", "placement_id", "ranks", "ready")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    model: ModelInfo
    placement_id: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    ready: bool
    def __init__(self, group_id: _Optional[int] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., placement_id: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., ready: _Optional[bool] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "model_type", "digest", "dtype", "num_layers", "moe_layers", "num_experts", "num_experts_per_token", "hidden_size", "intermediate_size", "vocab_size", "max_sequence_length", "has_tokenizer", "eos_token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_type: str
    digest: str
    dtype: _types_pb2.DataType
    num_layers: int
    moe_layers: _containers.RepeatedScalarFieldContainer[int]
    num_experts: int
    num_experts_per_token: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_sequence_length: int
    has_tokenizer: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., model_type: _Optional[str] = ..., digest: _Optional[str] = ..., dtype: _Optional[_Union[_types_pb2.DataType, str]] = ..., num_layers: _Optional[int] = ..., moe_layers: _Optional[_Iterable[int]] = ..., num_experts: _Optional[int] = ..., num_experts_per_token: _Optional[int] = ..., hidden_size: _Optional[int] = ..., intermediate_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("ep_rank", "address", "ready", "device", "pid", "instance_id", "num_steps", "num_running_requests", "num_queued_requests")
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ep_rank: int
    address: str
    ready: bool
    device: str
    pid: int
    instance_id: str
    num_steps: int
    num_running_requests: int
    num_queued_requests: int
    def __init__(self, ep_rank: _Optional[int] = ..., address: _Optional[str] = ..., ready: _Optional[bool] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., instance_id: _Optional[str] = ..., num_steps: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_queued_requests: _Optional[int] = ...) -> None: ...

class GetPlacementRequest(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    def __init__(self, group_id: _Optional[int] = ...) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("placement_id", "strategy", "layers")
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    placement_id: str
    strategy: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    def __init__(self, placement_id: _Optional[str] = ..., strategy: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ...) -> None: ...

class LayerPlacement(_message.Message):
    __slots__ = ("layer", "ranks")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    ranks: _containers.RepeatedCompositeFieldContainer[LocalExperts]
    def __init__(self, layer: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[LocalExperts, _Mapping]]] = ...) -> None: ...

class LocalExperts(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, experts: _Optional[_Iterable[int]] = ...) -> None: ...

class GetExpertLoadRequest(_message.Message):
    __slots__ = ("group_id", "by_adapter")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    BY_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    by_adapter: bool
    def __init__(self, group_id: _Optional[int] = ..., by_adapter: _Optional[bool] = ...) -> None: ...

class GetExpertLoadResponse(_message.Message):
    __slots__ = ("placement_id", "layers", "adapters")
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    placement_id: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerExpertLoad]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterExpertLoad]
    def __init__(self, placement_id: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerExpertLoad, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[AdapterExpertLoad, _Mapping]]] = ...) -> None: ...

class AdapterExpertLoad(_message.Message):
    __slots__ = ("name", "generation", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerExpertLoad]
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerExpertLoad, _Mapping]]] = ...) -> None: ...

class LayerExpertLoad(_message.Message):
    __slots__ = ("layer", "expert_rows", "rank_rows")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ROWS_FIELD_NUMBER: _ClassVar[int]
    RANK_ROWS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert_rows: _containers.RepeatedScalarFieldContainer[int]
    rank_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., expert_rows: _Optional[_Iterable[int]] = ..., rank_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("group_id", "layers", "num_redundant_experts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REDUNDANT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlacement]
    num_redundant_experts: int
    def __init__(self, group_id: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlacement, _Mapping]]] = ..., num_redundant_experts: _Optional[int] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("placement_id", "previous_placement_id", "step", "num_experts_read", "num_adapters", "spread_before", "spread_planned")
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    SPREAD_PLANNED_FIELD_NUMBER: _ClassVar[int]
    placement_id: str
    previous_placement_id: str
    step: int
    num_experts_read: int
    num_adapters: int
    spread_before: float
    spread_planned: float
    def __init__(self, placement_id: _Optional[str] = ..., previous_placement_id: _Optional[str] = ..., step: _Optional[int] = ..., num_experts_read: _Optional[int] = ..., num_adapters: _Optional[int] = ..., spread_before: _Optional[float] = ..., spread_planned: _Optional[float] = ...) -> None: ...

class GetMemoryRequest(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    def __init__(self, group_id: _Optional[int] = ...) -> None: ...

class GetMemoryResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankMemory]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankMemory, _Mapping]]] = ...) -> None: ...

class RankMemory(_message.Message):
    __slots__ = ("ep_rank", "base_expert_bytes", "base_dense_bytes", "kv_cache_bytes", "adapter_bytes", "process_anon_bytes", "base_expert_growth_bytes", "device_free_bytes", "device_total_bytes", "adapters", "device_allocated_bytes", "state_cache_bytes", "pinned_cache_bytes", "num_pin_failures")
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    BASE_EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_DENSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ANON_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_EXPERT_GROWTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PIN_FAILURES_FIELD_NUMBER: _ClassVar[int]
    ep_rank: int
    base_expert_bytes: int
    base_dense_bytes: int
    kv_cache_bytes: int
    adapter_bytes: int
    process_anon_bytes: int
    base_expert_growth_bytes: int
    device_free_bytes: int
    device_total_bytes: int
    adapters: _containers.RepeatedCompositeFieldContainer[ResidentAdapter]
    device_allocated_bytes: int
    state_cache_bytes: int
    pinned_cache_bytes: int
    num_pin_failures: int
    def __init__(self, ep_rank: _Optional[int] = ..., base_expert_bytes: _Optional[int] = ..., base_dense_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., process_anon_bytes: _Optional[int] = ..., base_expert_growth_bytes: _Optional[int] = ..., device_free_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[ResidentAdapter, _Mapping]]] = ..., device_allocated_bytes: _Optional[int] = ..., state_cache_bytes: _Optional[int] = ..., pinned_cache_bytes: _Optional[int] = ..., num_pin_failures: _Optional[int] = ...) -> None: ...

class ResidentAdapter(_message.Message):
    __slots__ = ("name", "generation", "adapter_slot", "expert_bytes", "dense_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DENSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    adapter_slot: int
    expert_bytes: int
    dense_bytes: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., adapter_slot: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., dense_bytes: _Optional[int] = ...) -> None: ...
