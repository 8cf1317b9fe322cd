"""Compile the expert layer's kernels in processes that never touch the GPU.

Each job runs `moe` on tensors without memory, with launches that stop after compiling; what it compiled lies in
Triton's disk cache, where the measuring process finds it. So compiling uses all cores while the GPU measures, and costs
none of its memory.

    python -m benchmarks.kernel_compile [--shapes a --tokens 256,4096] [--set delta_columns=32 --set pdl=true]

needs no GPU: it compiles what steps of the three shapes launch on an H200, fails if a kernel wants more shared memory
than a program can have there, and prints each kernel's registers a thread, stack bytes a thread (spilled registers) and
shared kilobytes. --set changes a field of the shipped configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.command_line import list_of
from benchmarks.kernel_cells import TOKENS
from benchmarks.kernel_layer import SHAPES, Shape
from compute_worker.kernels import AdapterTable, MoEConfig, MoEWeights, moe
from compute_worker.kernels.config import choose_config

H200 = "NVIDIA H200"
H200_CAPABILITY = 90
H200_SHARED_BYTES = 232_448
"""Of shared memory, for one program."""
_TOKENS = (1, 64, 256, 1024, 4096, 16384)
_LORA_RANKS = (0, 16, 512)
_META = torch.device("meta")


def shape_weights(shape: Shape, device: torch.device = _META) -> MoEWeights:
    """Weights of a shape that hold nothing yet."""
    e, d, f = shape.num_experts, shape.hidden_size, shape.intermediate_size
    return MoEWeights(
        gate_up_eND=torch.empty((e, 2 * f, d), dtype=torch.bfloat16, device=device),
        down_eDF=torch.empty((e, d, f), dtype=torch.bfloat16, device=device),
        num_routed_experts=shape.routed_experts,
    )


def _table(shape: Shape, max_lora_rank: int, num_slots: int) -> AdapterTable:
    return AdapterTable(
        num_slots=num_slots, num_experts=shape.num_experts, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, max_lora_rank=max_lora_rank, dtype=torch.bfloat16, device=_META,
    )  # fmt: skip


class _TargetOnly:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def begin(capability: int) -> None:
    """From here on, launches in this process compile, for a GPU of this capability, and do nothing else."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_TargetOnly(capability))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only


def _compile(shape_name: str, num_tokens: int, max_lora_rank: int, config: dict[str, Any], num_slots: int) -> str:
    """Empty, or why this configuration cannot be compiled."""
    shape = SHAPES[shape_name]
    t, k = num_tokens, shape.top_k
    try:
        moe(
            torch.empty((t, shape.hidden_size), dtype=torch.bfloat16, device=_META),
            torch.empty((t, k), dtype=torch.int32, device=_META),
            torch.empty((t, k), device=_META),
            torch.empty(t, dtype=torch.int32, device=_META),
            shape_weights(shape),
            _table(shape, max_lora_rank, num_slots) if max_lora_rank else None,
            config=MoEConfig.from_dict(config),
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _resources(kernel: Any) -> str:
    """Registers and stack bytes of a compiled kernel, as the GPU's own code says. Example: "168r", "255r+40"."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump prints no registers: {text}"
    return f"{found[1]}r" + (f"+{found[2]}" if found[2] != "0" else "")


def _arguments() -> argparse.Namespace:
    def field(text: str) -> tuple[str, Any]:
        name, _, value = text.partition("=")
        names = [of_config.name for of_config in dataclasses.fields(MoEConfig)]
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        try:
            return name, json.loads(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected JSON after the =, as in pdl=true") from None

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tokens = ",".join(map(str, TOKENS))
    parser.add_argument("--shapes", type=list_of(SHAPES), default=list(SHAPES), help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--tokens", type=list_of(TOKENS), default=list(_TOKENS), help=f"some of {tokens}")
    parser.add_argument("--set", type=field, action="append", default=[], metavar="FIELD=JSON")
    return parser.parse_args()


def main() -> None:
    """See the module."""
    args = _arguments()
    begin(H200_CAPABILITY)
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, Any]] = []
    run = JITFunction.run

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        launched.append((self.fn.__name__.removesuffix("_kernel"), kernel))
        return kernel

    JITFunction.run = noting
    too_large = False
    for name in args.shapes:
        shape = SHAPES[name]
        for num_tokens in args.tokens:
            config = choose_config(shape_weights(shape), num_tokens=num_tokens, top_k=shape.top_k, device_name=H200)
            for rank in _LORA_RANKS:
                launched.clear()
                failure = _compile(name, num_tokens, rank, config.to_dict() | dict(args.set), 8)
                most = max((kernel.metadata.shared for _, kernel in launched), default=0)
                too_large |= bool(failure) or most > H200_SHARED_BYTES
                kernels = ", ".join(f"{n} {_resources(k)} {k.metadata.shared >> 10}K" for n, k in launched)
                print(f"{name} {num_tokens:5d} tokens r {rank:3d}: {most} bytes {failure}; {kernels}", flush=True)
    sys.exit(1 if too_large else 0)


class CompileAhead:
    """A pool of compiling processes; jobs run in the order in which they were asked for."""

    def __init__(self, processes: int) -> None:
        major, minor = torch.cuda.get_device_capability()
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), initializer=begin, initargs=(10 * major + minor,)
        )
        self._jobs: dict[tuple[str, int, int, str], Future[str]] = {}

    def ask(self, shape: str, num_tokens: int, ranks: Iterable[int], config: MoEConfig, num_slots: int = 8) -> None:
        """Compile what a step of num_tokens launches with tables of each rank limit (0: without a table)."""
        for rank in ranks:
            key = (shape, num_tokens, rank, str(config))
            if key not in self._jobs:
                job = partial(_compile, shape, num_tokens, rank, config.to_dict(), num_slots)
                self._jobs[key] = self._pool.submit(job)

    def wait(self, shape: str, num_tokens: int, rank: int, config: MoEConfig) -> str:
        """Empty, or why it cannot be compiled; "" at once for what nobody asked for."""
        job = self._jobs.get((shape, num_tokens, rank, str(config)))
        return job.result(timeout=600) if job else ""

    def close(self) -> None:
        """Ends the processes; jobs that have not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
