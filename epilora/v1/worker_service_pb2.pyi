from epilora.v1 import cluster_service_pb2 as _cluster_service_pb2
from epilora.v1 import expert_service_pb2 as _expert_service_pb2
from epilora.v1 import generation_service_pb2 as _generation_service_pb2
from epilora.v1 import loader_service_pb2 as _loader_service_pb2
from epilora.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerInfoResponse(_message.Message):
    __slots__ = ("rank", "model", "load_spec", "dense_modules", "placement", "memory", "num_adapter_slots", "max_sequence_length", "steps", "group_instance_id", "expert_load")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_SPEC_FIELD_NUMBER: _ClassVar[int]
    DENSE_MODULES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOAD_FIELD_NUMBER: _ClassVar[int]
    rank: _cluster_service_pb2.RankInfo
    model: _cluster_service_pb2.ModelInfo
    load_spec: _types_pb2.MoEEPLoadSpec
    dense_modules: _containers.RepeatedCompositeFieldContainer[_types_pb2.DenseModule]
    placement: _cluster_service_pb2.GetPlacementResponse
    memory: _cluster_service_pb2.RankMemory
    num_adapter_slots: int
    max_sequence_length: int
    steps: StepStatistics
    group_instance_id: str
    expert_load: _containers.RepeatedCompositeFieldContainer[LocalExpertLoad]
    def __init__(self, rank: _Optional[_Union[_cluster_service_pb2.RankInfo, _Mapping]] = ..., model: _Optional[_Union[_cluster_service_pb2.ModelInfo, _Mapping]] = ..., load_spec: _Optional[_Union[_types_pb2.MoEEPLoadSpec, _Mapping]] = ..., dense_modules: _Optional[_Iterable[_Union[_types_pb2.DenseModule, _Mapping]]] = ..., placement: _Optional[_Union[_cluster_service_pb2.GetPlacementResponse, _Mapping]] = ..., memory: _Optional[_Union[_cluster_service_pb2.RankMemory, _Mapping]] = ..., num_adapter_slots: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., steps: _Optional[_Union[StepStatistics, _Mapping]] = ..., group_instance_id: _Optional[str] = ..., expert_load: _Optional[_Iterable[_Union[LocalExpertLoad, _Mapping]]] = ...) -> None: ...

class LocalExpertLoad(_message.Message):
    __slots__ = ("layer", "num_rows")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., num_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class GetAdapterLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAdapterLoadResponse(_message.Message):
    __slots__ = ("placement_id", "adapters")
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    placement_id: str
    adapters: _containers.RepeatedCompositeFieldContainer[LocalAdapterLoad]
    def __init__(self, placement_id: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[LocalAdapterLoad, _Mapping]]] = ...) -> None: ...

class LocalAdapterLoad(_message.Message):
    __slots__ = ("name", "generation", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    layers: _containers.RepeatedCompositeFieldContainer[LocalExpertLoad]
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LocalExpertLoad, _Mapping]]] = ...) -> None: ...

class StepStatistics(_message.Message):
    __slots__ = ("num_steps", "seconds", "num_tokens", "bucket_bounds", "bucket_counts", "num_expert_layers", "num_steps_by_form", "num_consensus_waits", "consensus_wait_seconds")
    class NumStepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class NumTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumExpertLayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumStepsByFormEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_BY_FORM_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSENSUS_WAITS_FIELD_NUMBER: _ClassVar[int]
    CONSENSUS_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_steps: _containers.ScalarMap[str, int]
    seconds: _containers.ScalarMap[str, float]
    num_tokens: _containers.ScalarMap[str, int]
    bucket_bounds: _containers.RepeatedScalarFieldContainer[float]
    bucket_counts: _containers.RepeatedScalarFieldContainer[int]
    num_expert_layers: _containers.ScalarMap[str, int]
    num_steps_by_form: _containers.ScalarMap[str, int]
    num_consensus_waits: int
    consensus_wait_seconds: float
    def __init__(self, num_steps: _Optional[_Mapping[str, int]] = ..., seconds: _Optional[_Mapping[str, float]] = ..., num_tokens: _Optional[_Mapping[str, int]] = ..., bucket_bounds: _Optional[_Iterable[float]] = ..., bucket_counts: _Optional[_Iterable[int]] = ..., num_expert_layers: _Optional[_Mapping[str, int]] = ..., num_steps_by_form: _Optional[_Mapping[str, int]] = ..., num_consensus_waits: _Optional[int] = ..., consensus_wait_seconds: _Optional[float] = ...) -> None: ...

class StageAdapterRequest(_message.Message):
    __slots__ = ("name", "generation", "slice")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    slice: _loader_service_pb2.Slice
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., slice: _Optional[_Union[_loader_service_pb2.Slice, _Mapping]] = ...) -> None: ...

class StageAdapterResponse(_message.Message):
    __slots__ = ("resident_bytes",)
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    def __init__(self, resident_bytes: _Optional[int] = ...) -> None: ...

class ActivateAdapterRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class ActivateAdapterResponse(_message.Message):
    __slots__ = ("adapter_slot", "step")
    ADAPTER_SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    adapter_slot: int
    step: int
    def __init__(self, adapter_slot: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class RetireAdapterRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class RetireAdapterResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class DiscardAdapterRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class DiscardAdapterResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class PreparePlacementRequest(_message.Message):
    __slots__ = ("move_number", "placement")
    MOVE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    move_number: int
    placement: _cluster_service_pb2.GetPlacementResponse
    def __init__(self, move_number: _Optional[int] = ..., placement: _Optional[_Union[_cluster_service_pb2.GetPlacementResponse, _Mapping]] = ...) -> None: ...

class PreparePlacementResponse(_message.Message):
    __slots__ = ("load_spec", "num_experts_read")
    LOAD_SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_READ_FIELD_NUMBER: _ClassVar[int]
    load_spec: _types_pb2.MoEEPLoadSpec
    num_experts_read: int
    def __init__(self, load_spec: _Optional[_Union[_types_pb2.MoEEPLoadSpec, _Mapping]] = ..., num_experts_read: _Optional[int] = ...) -> None: ...

class TakePlacementRequest(_message.Message):
    __slots__ = ("move_number",)
    MOVE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    move_number: int
    def __init__(self, move_number: _Optional[int] = ...) -> None: ...

class TakePlacementResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class AbandonPlacementRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbandonPlacementResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateTokensRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "adapter_generation", "sampling", "max_tokens", "stop_token_ids", "return_logits", "return_prompt_logits")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGITS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_LOGITS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter_generation: int
    sampling: _generation_service_pb2.SamplingOptions
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    return_logits: bool
    return_prompt_logits: bool
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., adapter_generation: _Optional[int] = ..., sampling: _Optional[_Union[_generation_service_pb2.SamplingOptions, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., return_logits: _Optional[bool] = ..., return_prompt_logits: _Optional[bool] = ...) -> None: ...

class GenerateTokensResponse(_message.Message):
    __slots__ = ("token_ids", "logits", "prompt_logits", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGITS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logits: _types_pb2.Tensor
    prompt_logits: _types_pb2.Tensor
    finish_reason: _generation_service_pb2.FinishReason
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logits: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., prompt_logits: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., finish_reason: _Optional[_Union[_generation_service_pb2.FinishReason, str]] = ...) -> None: ...

class ForwardExpertsRequest(_message.Message):
    __slots__ = ("request_id", "layer", "hidden_states", "top_k", "adapter_generations", "routed_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    layer: int
    hidden_states: _types_pb2.Tensor
    top_k: _expert_service_pb2.TopK
    adapter_generations: _containers.RepeatedScalarFieldContainer[int]
    routed_only: bool
    def __init__(self, request_id: _Optional[int] = ..., layer: _Optional[int] = ..., hidden_states: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., top_k: _Optional[_Union[_expert_service_pb2.TopK, _Mapping]] = ..., adapter_generations: _Optional[_Iterable[int]] = ..., routed_only: _Optional[bool] = ...) -> None: ...

class ForwardExpertsResponse(_message.Message):
    __slots__ = ("request_id", "hidden_states")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    hidden_states: _types_pb2.Tensor
    def __init__(self, request_id: _Optional[int] = ..., hidden_states: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...
