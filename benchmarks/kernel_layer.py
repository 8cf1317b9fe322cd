"""One expert layer as a benchmark sees it: shapes, random data, floors and graph-replay times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from compute_worker.kernels import AdapterTable, LayerAdapter, MoEConfig, MoEWeights, ProjectionSlice, moe

COPY_BYTES_PER_SECOND = 4.28e12
"""Measured on one H200: large device-to-device copy, bytes read plus bytes written."""
BF16_FLOPS_PER_SECOND = 679e12
"""Measured on one H200: sustained 8192^3 bf16 matrix product on random data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A layer: `num_experts` of `routed_experts` experts are local, rows of the others are remote."""

    name: str
    model: str
    num_experts: int
    routed_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


SHAPES = {
    "a": Shape(name="a", model="Qwen3-30B-A3B", num_experts=128, routed_experts=128, top_k=8, hidden_size=2048,
               intermediate_size=768),
    "b": Shape(name="b", model="DeepSeek-V3, one rank of EP8", num_experts=32, routed_experts=256, top_k=8,
               hidden_size=7168, intermediate_size=2048),
    "c": Shape(name="c", model="Mixtral 8x7B", num_experts=8, routed_experts=8, top_k=2, hidden_size=4096,
               intermediate_size=14336),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    x_TD: torch.Tensor
    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    slot_T: torch.Tensor

    def base_only(self) -> Batch:
        return Batch(x_TD=self.x_TD, expert_TK=self.expert_TK, weight_TK=self.weight_TK,
                     slot_T=torch.full_like(self.slot_T, -1))  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Layer:
    """Two weight sets, so that no call finds its weights in L2, and what has been built on them."""

    shape: Shape
    weights: list[MoEWeights] = field(default_factory=list)
    _routings: dict[int, list[Batch]] = field(default_factory=dict)

    @classmethod
    def random(cls, shape: Shape, device: torch.device) -> Layer:
        e, d, f = shape.num_experts, shape.hidden_size, shape.intermediate_size
        return cls(
            shape=shape,
            weights=[
                MoEWeights(
                    gate_up_eND=_random((e, 2 * f, d), d**-0.5, device),
                    down_eDF=_random((e, d, f), f**-0.5, device),
                    num_routed_experts=shape.routed_experts,
                )
                for _ in range(2)
            ],
        )

    def batches(self, *, num_tokens: int, num_adapters: int, half: bool, seed: int) -> list[Batch]:
        """As many batches as a graph holds calls (8 up to 256 tokens, 2 above): own inputs, routing and slots each."""
        if num_tokens not in self._routings:
            self._routings[num_tokens] = self._routed(num_tokens, seed)
        slot_g = torch.Generator().manual_seed(seed + 1)
        out = []
        for batch in self._routings[num_tokens]:
            slot = torch.randint(max(num_adapters, 1), (num_tokens,), generator=slot_g)
            if half:
                slot[torch.rand(num_tokens, generator=slot_g) < 0.5] = -1
            out.append(replace(batch, slot_T=slot.to(torch.int32).to(batch.x_TD.device)))
        return out

    def _routed(self, num_tokens: int, seed: int) -> list[Batch]:
        """Inputs and routings of a token count, the same whatever the adapters are; without adapters."""
        s, device = self.shape, self.weights[0].down_eDF.device
        g = torch.Generator().manual_seed(seed)
        out = []
        for _ in range(8 if num_tokens <= 256 else 2):
            expert = torch.rand(num_tokens, s.routed_experts, generator=g).topk(s.top_k, dim=1).indices
            weight = torch.rand(num_tokens, s.top_k, generator=g)
            out.append(
                Batch(
                    x_TD=_random((num_tokens, s.hidden_size), 1.0, device),
                    expert_TK=torch.where(expert < s.num_experts, expert, -1).to(torch.int32).to(device),
                    weight_TK=(weight / weight.sum(1, keepdim=True)).to(device),
                    slot_T=torch.full((num_tokens,), -1, dtype=torch.int32, device=device),
                )
            )
        return out

    def tables(self, ranks: Sequence[int]) -> list[AdapterTable]:
        """For each weight set, a table of len(ranks) adapters on gate, up and down, ranks[i] for slot i."""
        s, weights = self.shape, self.weights[0]
        tables = []
        for _ in self.weights:
            table = AdapterTable(
                num_slots=len(ranks), num_experts=s.num_experts, hidden_size=s.hidden_size,
                intermediate_size=s.intermediate_size, max_lora_rank=max(ranks), dtype=torch.bfloat16,
                device=weights.down_eDF.device,
            )  # fmt: skip
            for slot, rank in enumerate(ranks):
                table.set_slot(slot, random_adapter(s, rank, weights.down_eDF.device))
            tables.append(table)
        return tables


def _random(size: tuple[int, ...], std: float, device: torch.device) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device) * std


def random_adapter(shape: Shape, rank: int, device: torch.device) -> LayerAdapter:
    """Separate pairs for gate, up and down on every local expert, with deltas about as large as the base result."""
    d, f, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
    return {
        name: ProjectionSlice(
            a=_random((e * rank, size_in), size_in**-0.5, device),
            b=_random((size_out * e * rank,), rank**-0.5, device),
            lora_rank=torch.full((e,), rank, dtype=torch.int32),
            scale=torch.ones(e),
        )
        for name, size_in, size_out in (("gate", d, f), ("up", d, f), ("down", f, d))
    }


def floor_us(shape: Shape, batches: Sequence[Batch], ranks: Sequence[int], *, base: bool = True) -> float:
    """Mean over batches of max(bytes / copy rate, FLOPs / matrix rate): each needed weight, x and y moved once.

    ranks: lora rank by slot; empty for the base layer. base: count the base layer's work too, else only that of the
    hit (adapter, expert) pairs. Intermediates are not counted.
    """
    d, f = shape.hidden_size, shape.intermediate_size
    total = 0.0
    for batch in batches:
        expert, slot = batch.expert_TK.cpu(), batch.slot_T.cpu()
        local = expert >= 0
        num_bytes = flops = 0
        if base:
            num_bytes = 2 * (_distinct(expert[local]).numel() * 3 * d * f + 2 * batch.x_TD.numel())
            flops = int(local.sum()) * 6 * d * f
        if ranks:
            rows = local & (slot >= 0)[:, None]
            pair = (expert * len(ranks) + slot[:, None])[rows]
            rank = torch.tensor(list(ranks))
            num_bytes += 2 * 3 * (d + f) * int(rank[_distinct(pair) % len(ranks)].sum())
            flops += 2 * 3 * (d + f) * int(rank[pair % len(ranks)].sum())
        total += max(num_bytes / COPY_BYTES_PER_SECOND, flops / BF16_FLOPS_PER_SECOND)
    return 1e6 * total / len(batches)


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """Each value once, ascending."""
    distinct: torch.Tensor = values.unique()  # type: ignore[no-untyped-call]
    return distinct


def run_layer(layer: Layer, batch: Batch, index: int, tables: Sequence[AdapterTable] | None,
              config: MoEConfig | None) -> torch.Tensor:  # fmt: skip
    """One call on weight set index % 2."""
    table = tables[index % 2] if tables else None
    return moe(
        batch.x_TD, batch.expert_TK, batch.weight_TK, batch.slot_T, layer.weights[index % 2], table, config=config
    )


REST_SECONDS = 0.1
Calls = Sequence[Callable[[], object]]


def graph_us(calls: Calls, replays: int) -> float:
    """Median microseconds per call over replays of one CUDA graph that holds all calls."""
    return graphs_us({"": calls}, replays)[""]


def graphs_us(calls: Mapping[str, Calls], replays: int) -> dict[str, float]:
    """As `graph_us` for several, replayed in turn: what a warm GPU loses by the second, all of them lose.

    The GPU rests first. After a tenth of a second of large products it is at its power limit and lowers its clock by a
    fifth, so that a cell's time would depend on what ran before it.
    """
    graphs = {name: _capture(several) for name, several in calls.items()}
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    # A GPU that idled runs slowly at first, which a graph of microseconds would not outlast.
    warm_until = time.monotonic() + 0.02
    while time.monotonic() < warm_until:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: 1e3 * statistics.median(times[name]) / len(several) for name, several in calls.items()}


def _capture(calls: Calls) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def layer_calls(
    layer: Layer, batches: Sequence[Batch], tables: Sequence[AdapterTable] | None, config: MoEConfig | None
) -> Calls:
    """One call a batch; without tables the batches' slots are taken as -1."""
    used = list(batches) if tables else [b.base_only() for b in batches]
    return [partial(run_layer, layer, b, i, tables, config) for i, b in enumerate(used)]


def layer_us(layer: Layer, batches: Sequence[Batch], tables: Sequence[AdapterTable] | None, config: MoEConfig | None,
             replays: int) -> float:  # fmt: skip
    """Graph-replay time of one layer call; without tables the batches' slots are taken as -1."""
    return graph_us(layer_calls(layer, batches, tables, config), replays)
