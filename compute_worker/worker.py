"""One rank, put together: model, step loop, and what it says of itself."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable

import torch.distributed as dist

from compute_worker.board_consensus import make_consensus
from compute_worker.control_log import ControlLog
from compute_worker.ep_group import EPGroup
from compute_worker.expert_queue import ExpertQueue
from compute_worker.kv_blocks import KVBlockPool
from compute_worker.model_description import load_spec_of_model
from compute_worker.model_runner import ModelRunner
from compute_worker.scheduler import Scheduler
from compute_worker.step_loop import StepLoop
from compute_worker.tensors import data_type_of
from epilora.errors import InvalidArgumentError
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings
from epilora.v1 import cluster_service_pb2, types_pb2, worker_service_pb2


class Worker:
    """Builds and owns everything of one rank.

    Args:
        settings: of this process.
        group: the ranks that step together.
        on_failure: called when the step loop cannot go on.
    """

    def __init__(
        self, *, settings: WorkerSettings, group: EPGroup, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.settings = settings
        self.ep_rank = group.ep_rank
        self.model = load_spec_of_model(settings.model)
        self._group = group
        self._instance_id = uuid.uuid4().hex
        placement = ExpertPlacement.make(settings.placement, self.model, group.num_ranks // group.expert_tp)
        self.runner = ModelRunner(settings, self.model, placement, group)
        self.runner.warm_up()
        self.max_sequence_length = self.runner.max_sequence_length
        self.loop = self._make_loop(on_failure)
        self._group_instance_id = _agree_on_id(group, self._instance_id, placement.placement_id)

    def _make_loop(self, on_failure: Callable[[BaseException], None]) -> StepLoop:
        runner, settings = self.runner, self.settings
        control = ControlLog(
            num_slots=settings.num_adapter_slots,
            is_staged=runner.pool.is_staged,
            in_use=lambda generation: scheduler.uses(generation) or experts.uses(generation),
            activate=runner.pool.activate,
            retire=runner.pool.retire,
            moves=runner.mover,
        )
        scheduler = Scheduler(
            blocks=KVBlockPool(num_blocks=runner.num_kv_blocks, block_size=runner.kv_block_size),
            max_num_sequences=runner.max_num_sequences,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            slot_of=control.slot_of,
            is_staged=runner.pool.is_staged,
        )
        experts = ExpertQueue(
            max_num_tokens=settings.max_num_batched_tokens, slot_of=control.slot_of, is_staged=runner.pool.is_staged
        )
        return StepLoop(
            ep_rank=self.ep_rank,
            runner=runner,
            scheduler=scheduler,
            experts=experts,
            control=control,
            consensus=make_consensus(settings, self._group),
            expert_steps_per_generate_step=settings.expert_steps_per_generate_step,
            on_failure=on_failure,
        )

    def info(self) -> worker_service_pb2.GetWorkerInfoResponse:
        """The rank as a message."""
        placed = self.runner.placed
        return worker_service_pb2.GetWorkerInfoResponse(
            rank=cluster_service_pb2.RankInfo(
                ep_rank=self.ep_rank,
                address=self.settings.worker_address_of(self.ep_rank),
                ready=True,
                device=self._group.device_name,
                pid=os.getpid(),
                instance_id=self._instance_id,
                num_steps=self.loop.step,
                num_running_requests=self.loop.num_running,
                num_queued_requests=self.loop.num_queued,
            ),
            model=self._model_info(),
            load_spec=placed.load_spec.to_proto(),
            dense_modules=[
                types_pb2.DenseModule(module=m.module, in_features=m.in_features, out_features=m.out_features)
                for m in self.runner.dense_modules
            ],
            placement=placed.placement.to_proto(),
            memory=self._memory(),
            num_adapter_slots=self.settings.num_adapter_slots,
            max_sequence_length=self.max_sequence_length,
            steps=self.loop.statistics.to_proto(
                num_expert_layers=self.runner.num_expert_layers(), num_steps_by_form=self.runner.num_steps_by_form()
            ),
            group_instance_id=self._group_instance_id,
            expert_load=[
                worker_service_pb2.LocalExpertLoad(layer=layer, num_rows=rows)
                for layer, rows in placed.expert_load.rows.items()
            ],
        )

    def adapter_load(self) -> worker_service_pb2.GetAdapterLoadResponse:
        """The rows of each active adapter as a message."""
        placed = self.runner.placed
        return worker_service_pb2.GetAdapterLoadResponse(
            placement_id=placed.placement.placement_id,
            adapters=[
                worker_service_pb2.LocalAdapterLoad(
                    name=resident.name,
                    generation=resident.generation,
                    layers=[
                        worker_service_pb2.LocalExpertLoad(layer=layer, num_rows=rows)
                        for layer, rows in placed.expert_load.rows_of(resident.adapter_slot).items()
                    ],
                )
                for resident in self.runner.pool.residents()
                if resident.adapter_slot >= 0
            ],
        )

    def _model_info(self) -> cluster_service_pb2.ModelInfo:
        model = self.model
        first = model.moe_layers[0]
        return cluster_service_pb2.ModelInfo(
            name=model.name,
            model_type=model.model_type,
            digest=model.digest,
            dtype=data_type_of(self.runner.dtype),
            num_layers=model.num_layers,
            moe_layers=[layer.layer for layer in model.moe_layers],
            num_experts=first.num_experts,
            num_experts_per_token=model.num_experts_per_token,
            hidden_size=model.hidden_size,
            intermediate_size=first.intermediate_size,
            vocab_size=model.vocab_size,
            max_sequence_length=self.max_sequence_length,
            has_tokenizer=model.has_tokenizer,
            eos_token_ids=model.eos_token_ids,
        )

    def _memory(self) -> cluster_service_pb2.RankMemory:
        report = self.runner.memory()
        return cluster_service_pb2.RankMemory(
            ep_rank=self.ep_rank,
            base_expert_bytes=report.base_expert_bytes,
            base_dense_bytes=report.base_dense_bytes,
            kv_cache_bytes=report.kv_cache_bytes,
            state_cache_bytes=report.state_cache_bytes,
            adapter_bytes=report.adapter_bytes,
            process_anon_bytes=report.process_anon_bytes,
            base_expert_growth_bytes=report.base_expert_growth_bytes,
            device_free_bytes=report.device_free_bytes,
            device_total_bytes=report.device_total_bytes,
            device_allocated_bytes=report.device_allocated_bytes,
            pinned_cache_bytes=report.pinned_cache_bytes,
            num_pin_failures=report.num_pin_failures,
            adapters=[
                cluster_service_pb2.ResidentAdapter(
                    name=resident.name,
                    generation=resident.generation,
                    adapter_slot=resident.adapter_slot,
                    expert_bytes=resident.expert_bytes,
                    dense_bytes=resident.dense_bytes,
                )
                for resident in sorted(self.runner.pool.residents(), key=lambda r: r.generation)
            ],
        )


def _agree_on_id(group: EPGroup, mine: str, placement_id: str) -> str:
    """ep_rank 0's id, on every rank. Waits until every rank has loaded its weights.

    Raises:
        InvalidArgumentError: reason PLACEMENTS_DIFFER; the ranks start with different placements.
    """
    if group.num_ranks == 1:
        return mine
    everyone: list[tuple[str, str]] = [("", "")] * group.num_ranks
    dist.all_gather_object(everyone, (mine, placement_id), group=group.control_group)
    placement_ids = [other for _, other in everyone]
    if len(set(placement_ids)) > 1:
        raise InvalidArgumentError(
            f"The ranks start with different placements: {placement_ids}; give all of them the same EPILORA_PLACEMENT"
            " and model",
            reason="PLACEMENTS_DIFFER",
        )
    return everyone[0][0]
