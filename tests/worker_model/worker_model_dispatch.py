"""A layer of experts, its tokens and adapters, for tests of every way of sending rows."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.dispatch.all_to_all import AllToAllDispatcher
from compute_worker.dispatch.allgather_reducescatter import SPLIT_BYTES, AllGatherDispatcher
from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.packed_rows import HAS_TRITON
from compute_worker.dispatch.peer_memory import PeerMemory
from compute_worker.ep_group import EPGroup
from compute_worker.expert_layer import ExpertLayer, PhysicalExperts
from compute_worker.expert_load import ExpertLoad
from compute_worker.expert_shard import WHOLE, ExpertShard
from compute_worker.experts_base import ExpertWeights, LoraPair
from compute_worker.experts_loop import LoopBackend
from compute_worker.experts_torch import TorchLayerExperts
from compute_worker.step_context import CurrentStep, StepContext
from epilora.model_spec import GateUpLayout, ModelSpec
from epilora.placement import ExpertPlacement

RANKS = (1, 2, 3, 4)
COLLECTIVES = ("allgather_reducescatter", "all_to_all")
# Its kernels are interpreted where there is no GPU, over memory that the processes share.
BACKENDS = (*COLLECTIVES, *(["one_sided"] if HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1" else []))
PLACEMENTS = ("linear", "round_robin", "explicit")
LORA = ("all", "one", "no")
COUNTS = {"even": (16, 16, 16, 16), "ragged": (9, 2, 5, 1), "zero": (0, 7, 0, 3)}
# Triton's interpreter takes 3 ms for each row and rank it goes to: types are worked out anew for every operation, and
# every tl.max patches the language. Six rows a rank are the fewest with which every copy of an expert has a row.
INTERPRETED_COUNTS = {"even": (6, 6, 6, 6), "ragged": (5, 2, 6, 1), "zero": (0, 6, 0, 3)}
NUM_EXPERTS, TOP_K, HIDDEN, WIDTH, LORA_RANK, LAYER = 7, 3, 32, 24, 2, 1
COPIED = (0, 5)
NUM_ADAPTER_SLOTS = 2
PEER_BYTES = 1 << 16


class Case(NamedTuple):
    """One cell of the table.

    Attributes:
        sp: ranks that hold the same tokens, of which each dispatches its part.
        tp: ranks that share each expert's width.
    """

    backend: str
    placement: str
    lora: str
    counts: str
    sp: int = 1
    tp: int = 1

    def num_tokens(self, num_ranks: int) -> list[int]:
        """Tokens that each rank holds."""
        counts = (INTERPRETED_COUNTS if self.backend == "one_sided" else COUNTS)[self.counts]
        return [counts[rank // self.sp] for rank in range(num_ranks)]


def cases_of(num_ranks: int) -> list[Case]:
    """The table of so many ranks: all placements, adapters and counts over collectives, pairs over one_sided.

    Forms of parallel ranks go with every pair of the others. Void: a form of two ranks on an odd number of ranks.
    """
    forms = ((1, 1), (2, 1), (1, 2), (2, 2)) if num_ranks % 2 == 0 else ((1, 1),)
    squares = [(i, j, (i + j + 1) % 3) for i in range(3) for j in range(3)]
    cases = [Case(*parts) for parts in itertools.product(COLLECTIVES, PLACEMENTS, LORA, COUNTS)]
    for backend, form, (i, j, k) in itertools.product(COLLECTIVES, forms[1:], squares):
        cases.append(Case(backend, PLACEMENTS[i], LORA[j], [*COUNTS][k], *form))
    if "one_sided" in BACKENDS:
        # A fourth column that has each pair with the other three once; its first value is free for a form of its own.
        columns = ((forms[0], forms[-1], forms[0]), (forms[1 % len(forms)],) * 3, (forms[2 % len(forms)],) * 3)
        for i, j, k in squares:
            form = columns[(i + 2 * j + 1) % 3][i]
            cases.append(Case("one_sided", PLACEMENTS[i], LORA[j], [*COUNTS][k], *form))
    return cases


def make_placement(name: str, model: ModelSpec, num_ranks: int) -> ExpertPlacement:
    """explicit: experts in an odd order, and two of them on every rank, so that they have as many copies as ranks."""
    if name != "explicit":
        return ExpertPlacement.make(name, model, num_ranks)
    order = [3 * expert % NUM_EXPERTS for expert in range(NUM_EXPERTS)]
    ranks = [order[rank::num_ranks] for rank in range(num_ranks)]
    table = tuple(tuple(experts + [e for e in COPIED if e not in experts]) for experts in ranks)
    return ExpertPlacement(strategy="explicit", num_ranks=num_ranks, tables={LAYER: table})


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def make_layer(  # noqa: PLR0917
    placement: ExpertPlacement,
    ep_rank: int,
    dispatcher: Dispatcher,
    current: CurrentStep,
    load: ExpertLoad,
    shard: ExpertShard = WHOLE,
) -> ExpertLayer:
    """ep_rank: rank of the placement."""
    local = list(placement.local_experts(LAYER, ep_rank))
    gate_up_eHD = random_tensor(1, NUM_EXPERTS, 2 * WIDTH, HIDDEN)[local]
    width = shard.width(WIDTH)
    weights = ExpertWeights(
        gate_up_eHD=shard.first(gate_up_eHD, 1, GateUpLayout.CONCATENATED),
        down_eDF=shard.second(random_tensor(2, NUM_EXPERTS, HIDDEN, WIDTH)[local], 2).contiguous(),
        gate=lambda h_RH: F.silu(h_RH[:, :width]) * h_RH[:, width:],
        layout=GateUpLayout.CONCATENATED,
    )
    return ExpertLayer(
        layer=LAYER,
        experts=TorchLayerExperts(weights, LoopBackend()),
        physical=PhysicalExperts.make(placement, LAYER, torch.device("cpu"), ep_rank=ep_rank),
        dispatcher=dispatcher,
        current=current,
        counter=load.counter(LAYER),
    )


def make_adapter(seed: int, local: tuple[int, ...], shard: ExpertShard = WHOLE) -> AdapterTensors:
    """Pairs of all local experts for both projections."""
    pairs = {}
    ranks = (LORA_RANK,) * len(local)
    for projection, out_features, in_features in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        a = random_tensor(10 * seed + out_features, NUM_EXPERTS, LORA_RANK, in_features)[list(local)]
        b = random_tensor(11 * seed + out_features, NUM_EXPERTS, out_features, LORA_RANK)[list(local)]
        a, b = shard.pair(projection, GateUpLayout.CONCATENATED, a.flatten(0, 1), b.flatten(), ranks)
        pairs[projection] = LoraPair(
            a=a,
            b=b,
            lora_rank=ranks,
            scale_e=torch.full((len(local),), 0.5 * seed),
            out_features=out_features if projection == "down" else shard.width(out_features),
        )
    return AdapterTensors(layers={LAYER: pairs}, dense={}, buffers=())


def tokens_of(ep_rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, experts, weights) of one rank; a choice is missing here and there, token 4 has none at all."""
    generator = torch.Generator().manual_seed(100 + ep_rank)
    x_TD = torch.randn((num_tokens, HIDDEN), generator=generator)
    weight_TK, expert_TK = torch.rand((num_tokens, NUM_EXPERTS), generator=generator).topk(TOP_K, dim=1)
    expert_TK[1::5, 2] = -1
    expert_TK[4::5] = -1
    return x_TD, expert_TK, weight_TK


def slots_of(lora: str, ep_rank: int, num_ranks: int, num_tokens: int) -> list[int]:
    if lora == "no" or (lora == "one" and ep_rank != num_ranks - 1):
        return [-1] * num_tokens
    return [(-1, 0, 1)[t % 3] for t in range(num_tokens)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Whose tokens run, the tokens of every rank of the dispatch, and the experts that are local."""

    ep_rank: int
    num_ranks: int
    counts: list[int]
    local: tuple[int, ...]
    shard: ExpertShard = WHOLE


def run_layer(layer: ExpertLayer, current: CurrentStep, case: Case, place: Place) -> torch.Tensor:
    """The layer's output for the tokens that a case gives to a rank."""
    num_tokens = case.num_tokens(place.num_ranks)[place.ep_rank]
    holder = place.ep_rank // case.sp
    adapters = {slot: make_adapter(slot + 1, place.local, place.shard) for slot in (0, 1)}
    for slot, adapter in adapters.items():
        layer.experts.set_adapter(slot, adapter.layers[LAYER])
    current.context = StepContext(
        adapter_slots=slots_of(case.lora, holder, place.num_ranks // case.sp, num_tokens),
        num_tokens_per_rank=place.counts,
        active=adapters,
        device=torch.device("cpu"),
    )
    return layer.forward(*tokens_of(holder, num_tokens))


def make_dispatcher_of(
    backend: str, group: EPGroup, memory: PeerMemory | None, split_bytes: int = SPLIT_BYTES
) -> Dispatcher:
    """A backend by name; one_sided over the memory, of which it needs PEER_BYTES."""
    all_gather = AllGatherDispatcher(group, split_bytes=split_bytes)
    if backend == "one_sided":
        from compute_worker.dispatch.one_sided import OneSidedDispatcher
        from compute_worker.kernels.one_sided import Tiles

        assert memory is not None
        tiles = Tiles(block_bytes=128 if split_bytes else 64, max_programs=memory.max_programs)
        return OneSidedDispatcher(group, memory, overflow=all_gather, tiles=tiles)
    return AllToAllDispatcher(group) if backend == "all_to_all" else all_gather
