"""The model of one rank: packed tokens in, logits out, with adapters, in lockstep with the other ranks.

Legend: T tokens of this rank's step, K experts a token, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from compute_worker.adapter_pool import AdapterListener, AdapterPool
from compute_worker.adapter_tables import ExpertAdapters, LaunchKey, RowsAhead, RowwiseAdapters, tokens_apart
from compute_worker.base_weights import BaseWeights
from compute_worker.checkpoint import load_model
from compute_worker.decode_step import DecodeSteps, FixedInputs
from compute_worker.dense_lora import DenseLora, DenseTokens
from compute_worker.dispatch.choose import RowSizes, make_dispatcher
from compute_worker.ep_group import EPGroup
from compute_worker.expert_load import LoadOfAdapters
from compute_worker.expert_shard import ExpertShard
from compute_worker.experts_call import LayerCalls, TopK
from compute_worker.input_scaled_block import replace_blocks
from compute_worker.kv_cache import KVCache
from compute_worker.model_probe import ModelProbe, attach_attention, probe_model
from compute_worker.paged_attention import PagedAttention, SequenceSpan, prepare_step
from compute_worker.placement_move import Placed, PlacementMover
from compute_worker.query_scale import QueryScales
from compute_worker.recurrent import RecurrentLayers, attach_recurrent, fixed_parts, prepare_parts
from compute_worker.runner_parts import (
    MAX_KERNEL_RANK,
    attach_expert_layers,
    check_backend,
    choose_backend,
    compute_exactly,
    make_experts,
    make_kv_cache,
    make_registered,
    make_state_cache,
    max_adapter_bytes,
    rank_multiple_of,
    register_functions,
    use_fused_ops,
)
from compute_worker.slice_upload import SliceUploader
from compute_worker.step_batch import MemoryReport, StepBatch, is_decode
from compute_worker.step_context import CurrentStep, StepContext
from epilora.families import family_of
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.process_memory import anonymous_bytes
from epilora.settings import WorkerSettings

__all__ = ["MemoryReport", "ModelRunner", "SequenceSpan", "StepBatch"]


class ModelRunner:
    """See the module. forward and forward_experts belong to the step thread.

    Every rank calls them for every step in the same order, with the same num_tokens_per_rank.

    Attributes:
        num_kv_blocks: blocks of the key/value cache.
        kv_block_size: positions of a block.
        max_num_sequences: sequences that may run at once.
        vocab_size: V.
        computes_beside: forward returns before the device has computed.
        dtype: of the weights.
        dense_modules: modules outside the routed experts whose pairs take effect.
        layer_calls: calls of single MoE layers, and whether they can be.
        pool: the adapters in memory.
        mover: moves the experts to another placement.
        max_sequence_length: positions that a sequence may have.
    """

    def __init__(self, settings: WorkerSettings, model: ModelSpec, placement: ExpertPlacement, group: EPGroup) -> None:
        """Loads the weights of this rank.

        Raises:
            NotFoundError: no weight files.
            InvalidArgumentError: the weights do not fit config.json, or the settings do not fit the device.
        """
        assert placement.num_ranks * group.expert_tp == group.num_ranks, (placement.num_ranks, group)
        check_backend(settings, group.device)
        shard = ExpertShard.make(group.expert_tp_rank, group.expert_tp, model)
        register_functions()
        compute_exactly()
        self._device = group.device
        self.computes_beside = group.device.type == "cuda"
        self._num_ranks = group.num_ranks
        self._num_eager = 0
        self._spec = model
        placed = Placed.make(
            model,
            placement,
            group.placement_rank,
            num_adapter_slots=settings.num_adapter_slots,
            device=group.device,
        )
        self._loaded = load_model(settings, placed.load_spec, group.device, shard)
        self._model = self._loaded.model
        self.dtype = self._loaded.dtype
        self.vocab_size = model.vocab_size
        self.kv_block_size = settings.kv_block_size
        replace_blocks(self._model)
        family = family_of(model.model_type, model.moe_layers[0].gate_up_layout)
        self._dense_lora = DenseLora(logits_module=family.lm_head_path)
        self._dense_lora.attach(self._model, [spec.module for spec in model.dense_modules])
        with torch.inference_mode():
            scales = QueryScales(self._model)
            probe = probe_model(self._model, model, self._dense_lora, scales)
        self.dense_modules = probe.dense_modules
        self._current = CurrentStep()
        backend = choose_backend(settings, self._model, model, group.device)
        self._backend = backend
        use_fused_ops(self._model, backend, group.device)
        make = make_experts(backend, settings)
        self._dispatcher = make_dispatcher(settings, group, RowSizes.of(settings, model, self.dtype))
        self._layers = attach_expert_layers(
            self._model,
            model,
            placement,
            placement_rank=group.placement_rank,
            dispatcher=self._dispatcher,
            make=make,
            current=self._current,
            load=placed.expert_load,
            device=group.device,
        )
        self.layer_calls = LayerCalls(self._model, model, self._layers, dtype=self.dtype, device=group.device)
        self._launch_key = self._make_launch_key(settings, probe, backend)
        adapter_bytes = max_adapter_bytes(settings, group.device)
        self._registered = make_registered(settings, group.device)
        self.pool = self._make_pool(settings, placed, shard, backend, adapter_bytes)
        self.mover = PlacementMover(
            model=model,
            placed=placed,
            loaded=self._loaded,
            layers=self._layers,
            make_experts=make,
            pool=self.pool,
            device=group.device,
        )
        states = make_state_cache(settings, probe.state_shapes, device=group.device, adapter_bytes=adapter_bytes)
        self.max_num_sequences = states.num_places
        self._recurrent = RecurrentLayers(states, self._dense_lora)
        attach_recurrent(self._model, self._recurrent.forward)
        cache = make_kv_cache(
            settings, probe.kv_shapes, dtype=self.dtype, device=group.device, adapter_bytes=adapter_bytes
        )
        self.num_kv_blocks = cache.num_blocks
        self._attention = PagedAttention(cache)
        attach_attention(self._model, self._attention.forward, scales)
        longest = min(model.max_position_embeddings, self.num_kv_blocks * self.kv_block_size)
        self.max_sequence_length = min(settings.max_sequence_length or longest, longest)
        self._decode_steps = self._make_decode_steps(settings, cache)

    def _make_pool(
        self, settings: WorkerSettings, placed: Placed, shard: ExpertShard, backend: str, max_bytes: int
    ) -> AdapterPool:
        listeners: list[AdapterListener] = [
            ExpertAdapters(self._layers),
            LoadOfAdapters(lambda: self.placed.expert_load),
        ]
        rowwise = None
        if self._launch_key is not None:
            rowwise = self._launch_key.rowwise
            listeners += [rowwise, self._launch_key]
        return AdapterPool(
            model=dataclasses.replace(self._spec, dense_modules=self.dense_modules),
            load_spec=placed.load_spec,
            dtype=self.dtype if settings.adapter_dtype == "model" else None,
            device=self._device,
            max_bytes=max_bytes,
            base=BaseWeights(self._model, self._spec, lambda *place: self.mover.matrix_of(*place)),  # noqa: PLW0108 made below
            rank_multiple=rank_multiple_of(backend, self.dtype),
            shard=shard,
            listeners=listeners,
            max_lora_rank=MAX_KERNEL_RANK if backend == "triton" else 0,
            has_expert_gains=backend != "triton",
            uploader=SliceUploader(self._device) if self._device.type == "cuda" else None,
            registered=self._registered,
            prepare=RowsAhead(self._layers, rowwise, self._device) if backend == "triton" else None,
        )

    def _make_launch_key(self, settings: WorkerSettings, probe: ModelProbe, backend: str) -> LaunchKey | None:
        """What the adapters need of decode steps of fixed shapes; None where these cannot be."""
        if backend != "triton" or not self._dispatcher.has_fixed_shapes or settings.decode_graphs == "off":
            return None
        rowwise = RowwiseAdapters(probe, num_slots=settings.num_adapter_slots, dtype=self.dtype, device=self._device)
        return LaunchKey(self._layers, rowwise)

    def _make_decode_steps(self, settings: WorkerSettings, cache: KVCache) -> DecodeSteps | None:
        self._apart: list[DenseTokens] = []
        if self._launch_key is None:
            return None
        steps = DecodeSteps(
            forward=self._forward_fixed,
            launch_key=self._launch_key,
            cache=cache,
            max_tokens=settings.max_num_sequences,
            max_blocks=-(-self.max_sequence_length // self.kv_block_size),
            spare_place=self._recurrent.cache.spare_place,
        )
        self.mover.on_placed = steps.forget_graphs
        return steps

    @torch.inference_mode()
    def forward(self, batch: StepBatch | None, num_tokens_per_rank: Sequence[int]) -> torch.Tensor | None:
        """One generate step.

        Args:
            batch: this rank's tokens; None if it has none, then it only joins the experts' collectives.
            num_tokens_per_rank: tokens of every rank, agreed before.

        Returns:
            float32 [len(logits_rows), V] on the device, in the order of logits_rows; None without a batch.
        """
        bucket = self._decode_steps.bucket(num_tokens_per_rank) if self._decode_steps else 0
        if self._decode_steps and bucket and (batch is None or is_decode(batch)):
            self._apart = tokens_apart(batch.adapter_slots, self.pool.active(), self._device) if batch else []
            logits_MV = self._decode_steps.run(bucket, batch, as_graph=not self._apart)
            self._apart = []
            return logits_MV[self._tensor(batch.logits_rows)] if batch else None
        self._num_eager += 1
        if batch is None:
            with self._step([], num_tokens_per_rank, pad_to=bucket):
                for layer in self._layers:
                    self.layer_calls.join_empty(layer)
            return None
        num_tokens = len(batch.token_ids)
        with self._step(batch.adapter_slots, num_tokens_per_rank, pad_to=bucket) as context:
            self._dense_lora.logits_adapters = context.dense_tokens(batch.logits_rows)
            self._attention.step = prepare_step(self._attention.cache, batch.sequences, num_tokens)
            if self._recurrent.cache.shapes:
                self._recurrent.parts = prepare_parts(batch.sequences, context.dense_tokens, self._device)
            output = self._model(
                input_ids=self._tensor([batch.token_ids]),
                position_ids=self._tensor([batch.positions]),
                use_cache=False,
                logits_to_keep=self._tensor(batch.logits_rows),
            )
        logits_NV: torch.Tensor = output.logits[0].float()
        return logits_NV

    def _forward_fixed(self, inputs: FixedInputs) -> torch.Tensor:
        """The model on M rows, whose logits all are wanted; float32 [M, V]."""
        num_rows = inputs.adapter_slots.shape[0]
        fixed = (inputs.adapter_slots, inputs.num_rows)
        with self._step([], [num_rows] * self._num_ranks, fixed=fixed):
            assert self._launch_key is not None
            self._dense_lora.rowwise = self._launch_key.rowwise
            self._dense_lora.rowwise.adapter_slots = inputs.adapter_slots
            self._dense_lora.adapters = self._dense_lora.logits_adapters = self._apart
            self._attention.step = inputs.attention
            self._recurrent.parts = fixed_parts(inputs.places, inputs.attention.kv_len_M, self._apart)
            output = self._model(input_ids=inputs.token_ids, position_ids=inputs.positions, use_cache=False)
            logits_MV: torch.Tensor = output.logits[0].float()
            return logits_MV

    def enter_thread(self) -> None:
        """To be called once in a thread that computes: each has a current device of its own, for kernels and graphs."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Makes the first decode steps as fast as later ones. All ranks call it together, before the first step."""
        if self._decode_steps is not None and self._device.type == "cuda":
            self._decode_steps.warm_up()

    @torch.inference_mode()
    def forward_experts(  # noqa: PLR0917
        self,
        layer: int,
        x_TD: torch.Tensor | None,
        topk: TopK | None,
        adapter_slots: Sequence[int],
        routed_only: bool,
        num_tokens_per_rank: Sequence[int],
    ) -> torch.Tensor | None:
        """One MoE layer's MLP block on this rank's tokens; layer_calls.check must hold for the arguments.

        Args:
            layer: decoder layer.
            x_TD: input of the block, any float dtype; None (or T 0): this rank has no tokens.
            topk: experts and weights chosen by the caller; None: by the layer's router, with its adapters.
            adapter_slots: T slots, -1 for the base model.
            routed_only: leave out shared experts.
            num_tokens_per_rank: tokens of every rank, agreed before.

        Returns:
            y_TD in the model's dtype, on the device; None for x_TD None.
        """
        slots = [] if x_TD is None or x_TD.shape[0] == 0 else adapter_slots
        with self._step(slots, num_tokens_per_rank) as context:
            return self.layer_calls.forward(context, layer, x_TD, topk, routed_only)

    @property
    def placed(self) -> Placed:
        """The placement of the next step, and the rows counted under it; another object after each move."""
        return self.mover.placed

    def num_expert_layers(self) -> dict[str, int]:
        """MoE layers computed since the start, by expert backend; those of replayed graphs count, too."""
        replayed = self._decode_steps.num_replayed * len(self._layers) if self._decode_steps else 0
        return {self._backend: replayed + sum(layer.experts.num_calls for layer in self._layers.values())}

    def num_steps_by_form(self) -> dict[str, int]:
        """Generate steps since the start: "graph" (replayed), "fixed" (same shapes, not captured yet), "eager"."""
        steps = self._decode_steps
        forms = {"graph": steps.num_replayed, "fixed": steps.num_run} if steps else {}
        return {**forms, "eager": self._num_eager}

    def memory(self) -> MemoryReport:
        """Bytes in use now."""
        is_gpu = self._device.type == "cuda"
        registered = self._registered.state() if self._registered is not None else None
        free, total = torch.cuda.mem_get_info(self._device) if is_gpu else (0, 0)
        return MemoryReport(
            base_expert_bytes=self.mover.num_bytes(),
            base_dense_bytes=self._loaded.base_dense_bytes,
            kv_cache_bytes=self._attention.cache.num_bytes(),
            state_cache_bytes=self._recurrent.cache.num_bytes(),
            adapter_bytes=self.pool.num_bytes(),
            process_anon_bytes=anonymous_bytes(),
            base_expert_growth_bytes=self._loaded.base_expert_growth_bytes,
            device_free_bytes=free,
            device_total_bytes=total,
            pinned_cache_bytes=registered.num_bytes if registered is not None else 0,
            num_pin_failures=registered.num_failures if registered is not None else 0,
            device_allocated_bytes=torch.cuda.memory_allocated(self._device) if is_gpu else 0,
        )

    @contextmanager
    def _step(
        self,
        adapter_slots: Sequence[int],
        num_tokens_per_rank: Sequence[int],
        *,
        pad_to: int = 0,
        fixed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Iterator[StepContext]:
        """Tells all layers of the step; afterwards nothing holds on to an adapter."""
        context = StepContext(
            adapter_slots=adapter_slots,
            num_tokens_per_rank=num_tokens_per_rank,
            active=self.pool.active(),
            device=self._device,
            pad_to=pad_to,
            fixed=fixed,
        )
        self._current.context = context
        self._dense_lora.adapters = context.dense_tokens()
        try:
            yield context
        finally:
            self._current.context = None
            self._dense_lora.adapters = self._dense_lora.logits_adapters = ()
            self._dense_lora.rowwise = None
            self._attention.step = None
            self._recurrent.parts = ()

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
