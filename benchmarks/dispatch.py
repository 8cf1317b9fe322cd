"""Times dispatch and combine of one MoE layer over the ranks there are, against four tensors in one NCCL group call.

    torchrun --nproc-per-node 2 -m benchmarks.dispatch --out benchmarks/results/dispatch.json
    torchrun --nproc-per-node 2 -m benchmarks.dispatch --device cpu --tokens 8   # tries the code

Packing and unpacking are in the times. Backends whose launches depend on shapes alone run as CUDA graphs of ten calls;
`all_to_all`, whose host waits for counts, runs as it is. `layer_us` is of one graph of dispatches and combines in turn,
as `reference_us` is of the reference's: these two compare. `dispatch_us` and `combine_us` are graphs of either alone.
Each cell is compared with what one rank computes first, and gets a time only if it is right. A time is the median over
replays, of the slowest rank. What is compared is replayed in turn, and the devices meet before each replay, so that
neither warmth nor the hosts' pace favours one. The reference has NCCL as it is; `reference_same_ctas_us` is the
reference with as many of NCCL's thread blocks as this program's own group has (`compute_worker.ep_group.NCCL_CTAS`).
On a CPU nothing is written. `benchmarks.dispatch_report` writes the table of docs/dispatch.md from the results, and
`benchmarks.dispatch_simulation` goes on from here to more ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command_line import at_least, need_cuda, refusing
from benchmarks.dispatch_costs import layer_us
from compute_worker.board_consensus import make_consensus
from compute_worker.collectives import all_gather, reduce_scatter
from compute_worker.consensus import Proposal
from compute_worker.dispatch.all_to_all import AllToAllDispatcher
from compute_worker.dispatch.allgather_reducescatter import AllGatherDispatcher
from compute_worker.dispatch.base import ArrivedTokens, CombineHandle, Dispatcher
from compute_worker.dispatch.peer_memory import PeerMemory, why_no_peer_memory
from compute_worker.ep_group import EPGroup
from epilora.settings import WorkerSettings

HIDDEN = (2048, 7168)
TOKENS = (8, 64, 256, 4096)
TOP_K, NUM_EXPERTS = 8, 128
CALLS, REPLAYS, WARM_UP = 10, 50, 3
EXCHANGES = 2000
MEETING_CYCLES = 500_000
"""Of waiting on the device before a replay: the host has launched it all by then."""
MAX_RELATIVE_ERROR = 2e-2
PARTS = ("dispatch", "combine", "layer", "reference", "reference_same_ctas")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One rank's tokens."""

    x_TD: torch.Tensor
    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    slot_T: torch.Tensor

    @classmethod
    def make(cls, group: EPGroup, hidden: int, num_tokens: int) -> Inputs:
        """Random tokens, in bfloat16 on a GPU, float32 on a CPU."""
        generator = torch.Generator().manual_seed(group.ep_rank)
        weight_TK, expert_TK = torch.rand((num_tokens, NUM_EXPERTS), generator=generator).topk(TOP_K, dim=1)
        x_TD = torch.randn((num_tokens, hidden), generator=generator)
        dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
        return cls(
            x_TD=x_TD.to(group.device, dtype),
            expert_TK=expert_TK.to(group.device),
            weight_TK=weight_TK.to(group.device),
            slot_T=torch.randint(-1, 8, (num_tokens,), generator=generator, dtype=torch.int32).to(group.device),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.x_TD.shape[0]


class Reference:
    """The reference scheme: hidden states, ids, weights and slots in one group call; parts back by reduce-scatter."""

    def __init__(self, group: EPGroup, inputs: Inputs, *, with_slots: bool) -> None:
        self._group = group
        self._send = [inputs.x_TD, inputs.expert_TK.int(), inputs.weight_TK]
        if with_slots:
            self._send.append(inputs.slot_T)
        self._received = [
            tensor.new_empty((group.num_ranks * tensor.shape[0], *tensor.shape[1:])) for tensor in self._send
        ]
        self._y_TD = torch.empty_like(inputs.x_TD)

    def dispatch(self) -> None:
        """All tensors, one launch where the backend can."""
        group = self._group
        if group.device.type != "cuda":
            for received, send in zip(self._received, self._send, strict=True):
                all_gather(received, send, group=group.data_group)
            return
        with dist._coalescing_manager(group=group.data_group, device=group.device):  # type: ignore[attr-defined]
            for received, send in zip(self._received, self._send, strict=True):
                # As bytes: tensors of one launch have one type.
                all_gather(received.view(torch.uint8), send.view(torch.uint8), group=group.data_group)

    def combine(self) -> None:
        """What arrived goes back as if computed."""
        reduce_scatter(self._y_TD, self._received[0], group=self._group.data_group)

    def run(self) -> None:
        """One layer."""
        self.dispatch()
        self.combine()


class Ours:
    """One layer through one of our dispatchers."""

    def __init__(self, group: EPGroup, dispatcher: Dispatcher, inputs: Inputs, *, with_slots: bool) -> None:
        self._group, self._inputs = group, inputs
        self._dispatcher = dispatcher
        self._extras = {"adapter_slot": inputs.slot_T} if with_slots else {}
        base, remainder = divmod(NUM_EXPERTS, group.num_ranks)
        self._rank_offsets = [rank * base + min(rank, remainder) for rank in range(group.num_ranks + 1)]

    def dispatch(self) -> tuple[ArrivedTokens, CombineHandle]:
        """Sends the tokens."""
        inputs = self._inputs
        return self._dispatcher.dispatch(
            inputs.x_TD,
            inputs.expert_TK,
            inputs.weight_TK,
            self._extras,
            rank_offsets=self._rank_offsets,
            num_tokens_per_rank=[inputs.num_tokens] * self._group.num_ranks,
        )

    def combine(self, y_ND: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Brings results back."""
        return self._dispatcher.combine(y_ND, handle)

    def layer(self) -> torch.Tensor:
        """One layer: what arrived goes back as if computed."""
        arrived, handle = self.dispatch()
        return self.combine(arrived.x_ND, handle)

    def computed(self) -> torch.Tensor:
        """A whole layer, where expert e multiplies by e + 1."""
        arrived, handle = self.dispatch()
        first = self._rank_offsets[self._group.ep_rank]
        factor_N = (arrived.weight_NK * torch.where(arrived.slot_NK < 0, 0, arrived.slot_NK + first + 1)).sum(dim=1)
        part_ND = (arrived.x_ND.float() * factor_N.unsqueeze(1)).to(arrived.x_ND.dtype)
        return self.combine(part_ND, handle)

    def check(self) -> None:
        """SystemExit unless a layer gives what one rank computes, the same bits each time, and replayed as a graph."""
        inputs, y_TD = self._inputs, self.computed()
        expected = inputs.x_TD.float() * (inputs.weight_TK * (inputs.expert_TK + 1)).sum(dim=1, keepdim=True)
        error = float((y_TD.float() - expected).norm() / expected.norm())
        what = f"{type(self._dispatcher).__name__}, {tuple(inputs.x_TD.shape)}"
        if not error <= MAX_RELATIVE_ERROR:
            raise SystemExit(f"{what}: relative error {error:.3g}, expected at most {MAX_RELATIVE_ERROR}")
        if not torch.equal(self.computed(), y_TD):
            raise SystemExit(f"{what}: two runs differ")
        if self._dispatcher.has_fixed_shapes and inputs.x_TD.is_cuda:
            graph = captured(self.computed, 1)
            for _ in range(3):
                graph.replay()
            if not torch.equal(graph.outputs[0], y_TD):
                raise SystemExit(f"{what}: a replayed graph differs from a run")


class Graph:
    """Calls captured as one CUDA graph, and what they returned."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """Runs them again."""
        self._graph.replay()


def captured(call: Callable[[], Any], count: int) -> Graph:
    """Captures a call several times in a row."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The process group's own thread looks at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [call() for _ in range(count)]
    return Graph(graph, outputs)


class Clock:
    """Times a call that all ranks make together, microseconds of the slowest rank."""

    def __init__(self, group: EPGroup) -> None:
        self._group = group
        self._meeting = torch.zeros(1, device=group.device)

    def graphs_us(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Each as a CUDA graph of several calls, replayed in turn; as they are on a CPU."""
        if self._group.device.type != "cuda":
            return {name: self.eager_us(call) for name, call in calls.items()}
        graphs = {name: captured(call, CALLS) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(REPLAYS + WARM_UP):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                torch.cuda._sleep(MEETING_CYCLES)  # type: ignore[no-untyped-call]
                dist.all_reduce(self._meeting, group=self._group.data_group)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1000 / CALLS)
        return {name: self._slowest(statistics.median(own[WARM_UP:])) for name, own in times.items()}

    def eager_us(self, call: Callable[[], object]) -> float:
        """As it is."""
        times = []
        for _ in range(REPLAYS + WARM_UP):
            self._synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e6 / CALLS)
        return self._slowest(statistics.median(times[WARM_UP:]))

    def _synchronize(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, mine: float) -> float:
        times = [0.0] * self._group.num_ranks
        dist.all_gather_object(times, mine, group=self._group.control_group)
        return max(times)


def with_default_options(group: EPGroup) -> EPGroup:
    """The same ranks, with a data group of NCCL's default options."""
    if group.device.type != "cuda":
        return group
    return replace(group, data_group=dist.new_group(backend="nccl"))


def measure_cells(
    group: EPGroup, default_group: EPGroup, backend: str, dispatcher: Dispatcher, inputs: Inputs
) -> list[dict[str, Any]]:
    """The two cells of these tokens: with adapter slots, and without."""
    clock, calls = Clock(group), dict[str, Callable[[], object]]()
    for slots in (True, False):
        ours = Ours(group, dispatcher, inputs, with_slots=slots)
        ours.check()
        arrived, handle = ours.dispatch()
        y_ND = arrived.x_ND.contiguous()
        calls[f"dispatch {slots}"] = ours.dispatch
        calls[f"combine {slots}"] = partial(ours.combine, y_ND, handle)
        calls[f"layer {slots}"] = ours.layer
        calls[f"reference {slots}"] = Reference(default_group, inputs, with_slots=slots).run
        calls[f"reference_same_ctas {slots}"] = Reference(group, inputs, with_slots=slots).run
    eager = {} if dispatcher.has_fixed_shapes else {name: call for name, call in calls.items() if "ref" not in name}
    times_us = clock.graphs_us({name: call for name, call in calls.items() if name not in eager})
    times_us |= {name: clock.eager_us(call) for name, call in eager.items()}
    return [
        {
            "backend": backend,
            "hidden": inputs.x_TD.shape[1],
            "tokens_per_rank": inputs.num_tokens,
            "with_slots": slots,
            **{f"{name}_us": round(times_us[f"{name} {slots}"], 2) for name in PARTS},
        }
        for slots in (True, False)
    ]


def make_dispatchers(group: EPGroup, *, hidden: int, num_tokens: int) -> dict[str, Dispatcher]:
    """Those that these ranks can have, for so many tokens of each."""
    all_gather = AllGatherDispatcher(group)
    collectives: dict[str, Dispatcher] = {
        "allgather_reducescatter": all_gather,
        "all_to_all": AllToAllDispatcher(group),
    }
    problem = why_no_peer_memory(group)
    if problem:
        print(f"no one_sided: {problem}")
        return collectives
    from compute_worker.dispatch.one_sided import OneSidedDispatcher

    num_bytes = OneSidedDispatcher.num_bytes(
        num_ranks=group.num_ranks, num_rows=num_tokens, hidden=hidden, element_bytes=2, top_k=TOP_K, num_extras=1
    )
    memory = PeerMemory.open(group, num_bytes)
    return {**collectives, "one_sided": OneSidedDispatcher(group, memory, overflow=all_gather)}


def consensus_us(group: EPGroup, settings: WorkerSettings) -> float:
    """One exchange of the ranks' proposals, as before each step."""
    consensus = make_consensus(settings, group)
    for step in range(EXCHANGES):
        consensus.exchange(Proposal(step=step))
    start = time.perf_counter()
    for step in range(EXCHANGES, 2 * EXCHANGES):
        consensus.exchange(Proposal(step=step))
    return (time.perf_counter() - start) * 1e6 / EXCHANGES


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """All cells."""
    settings = WorkerSettings(model=Path(), num_ranks=arguments.ranks, device=arguments.device)
    group = EPGroup.from_environment(settings)
    default_group, cells = with_default_options(group), []
    dispatchers = make_dispatchers(group, hidden=max(arguments.hidden), num_tokens=max(arguments.tokens))
    with torch.inference_mode():
        for hidden in arguments.hidden:
            for num_tokens in arguments.tokens:
                inputs = Inputs.make(group, hidden, num_tokens)
                for backend, dispatcher in dispatchers.items():
                    measured = measure_cells(group, default_group, backend, dispatcher, inputs)
                    cells += measured
                    if group.ep_rank == 0:
                        print(*map(_line, measured), sep="\n", flush=True)
    result: dict[str, object] = {
        "hardware": f"{group.num_ranks} x {group.device_name.partition(' ')[2] or 'CPU'}",
        "torch": torch.__version__,
        "consensus_us": round(consensus_us(group, settings), 2),
        "cells": cells,
    }
    if group.ep_rank == 0:
        print(f"consensus {result['consensus_us']} us")
        if arguments.out and group.device.type == "cuda":
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return result


def _line(cell: dict[str, Any]) -> str:
    ratio, same = (layer_us(cell) / cell[name] for name in ("reference_us", "reference_same_ctas_us"))
    slots = "with slots" if cell["with_slots"] else "no slots"
    return (
        f"{cell['backend']:24} D {cell['hidden']:5} T {cell['tokens_per_rank']:5} {slots:10}"
        f" dispatch {cell['dispatch_us']:8} combine {cell['combine_us']:8} layer {cell['layer_us']:8}"
        f" reference {cell['reference_us']:8} us, ratio {ratio:.3f}, to the reference with as many CTAs {same:.3f}"
    )


def main() -> None:
    """Entry point; run it with torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results (GPU only)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--hidden", type=at_least(1), nargs="+", default=HIDDEN)
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=TOKENS)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        need_cuda(parser, num_here, instead="; --device cpu tries the code without one")
    with refusing(parser):
        measure(arguments)


if __name__ == "__main__":
    main()
