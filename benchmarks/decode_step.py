"""One rank's steps on a GPU, without the service: a random-weight Qwen3-30B-A3B with adapters of rank 16.

    python -m benchmarks.decode_step --out benchmarks/results/decode_step.json [--profile]

Decode steps run as the service runs them (one CUDA graph), timed on the device and on the host; a prefill is timed
whole and beside the sum of its expert layers. The floor of a decode step is the time to read what it must.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import qwen3_30b
from benchmarks.command_line import end_in_order, need_cuda
from benchmarks.qwen3_30b import HEAD_DIM, HIDDEN, INTERMEDIATE, LORA_RANK, NUM_EXPERTS, NUM_HEADS, VOCAB
from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.dense_lora import DensePair
from compute_worker.ep_group import EPGroup
from compute_worker.experts_base import LoraPair
from compute_worker.model_description import load_spec_of_model
from compute_worker.model_runner import ModelRunner, SequenceSpan, StepBatch
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

BYTES_PER_SECOND = 4.28e12
"""Read bandwidth measured on an H200 (docs/kernels.md)."""
NUM_ADAPTERS = 8
CONTEXT = 128
REPEATS = 30


def make_adapter(num_layers: int, seed: int) -> AdapterTensors:
    """Pairs for q_proj, o_proj and every expert, random, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * 0.03).to(torch.bfloat16)

    layers, dense = {}, {}
    # Small: with random deltas as large as weights, all tokens would go to few experts.
    scale = torch.full((NUM_EXPERTS,), 0.02, device="cuda")
    for layer in range(num_layers):
        pairs = {}
        for name, out, inner in (
            ("gate", INTERMEDIATE, HIDDEN),
            ("up", INTERMEDIATE, HIDDEN),
            ("down", HIDDEN, INTERMEDIATE),
        ):
            pairs[name] = LoraPair(
                a=draw(NUM_EXPERTS * LORA_RANK, inner),
                b=draw(NUM_EXPERTS * LORA_RANK * out),
                lora_rank=(LORA_RANK,) * NUM_EXPERTS,
                scale_e=scale,
                out_features=out,
            )
        layers[layer] = pairs
        width = NUM_HEADS * HEAD_DIM
        for name, out, inner in (("q_proj", width, HIDDEN), ("o_proj", HIDDEN, width)):
            pair = DensePair(a=draw(LORA_RANK, inner), b=draw(out, LORA_RANK), scale=0.02)
            dense[f"model.layers.{layer}.self_attn.{name}"] = pair
    return AdapterTensors(layers=layers, dense=dense, buffers=())


def decode_batch(runner: ModelRunner, batch: int, num_adapters: int) -> StepBatch:
    """Sequences with CONTEXT positions, their adapters in turn."""
    rng = random.Random(batch)
    blocks = -(-CONTEXT // runner.kv_block_size)
    return StepBatch(
        token_ids=[rng.randrange(1000, VOCAB - 1000) for _ in range(batch)],
        positions=[CONTEXT - 1] * batch,
        adapter_slots=[row % num_adapters if num_adapters else -1 for row in range(batch)],
        sequences=[
            SequenceSpan(
                query_start=row,
                query_len=1,
                kv_len=CONTEXT,
                block_table=tuple(range(row * blocks, (row + 1) * blocks)),
                place=row,
            )
            for row in range(batch)
        ],
        logits_rows=list(range(batch)),
    )


def time_decode(runner: ModelRunner, batch: int, num_adapters: int) -> dict[str, object]:
    """Medians over steps, milliseconds: on the device, and on the host with the choice of tokens."""
    step = decode_batch(runner, batch, num_adapters)
    for _ in range(3):
        runner.forward(step, [batch])
    device, host = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        first, last = _events()
        start = time.perf_counter()
        first.record()
        logits = runner.forward(step, [batch])
        last.record()
        assert logits is not None
        logits.max(dim=-1).indices.tolist()
        host.append((time.perf_counter() - start) * 1000)
        device.append(first.elapsed_time(last))
    return {
        "batch": batch,
        "adapters": num_adapters,
        "device_ms": sorted(device)[REPEATS // 2],
        "host_ms": sorted(host)[REPEATS // 2],
        "form": dict(runner.num_steps_by_form()),
    }


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, last


def time_prefill(runner: ModelRunner, num_tokens: int, num_adapters: int) -> dict[str, object]:
    """One prompt, its adapter 0 or none: whole, and the expert layers of it alone."""
    blocks = tuple(range(-(-num_tokens // runner.kv_block_size)))
    rng = random.Random(1)
    batch = StepBatch(
        token_ids=[rng.randrange(1000, VOCAB - 1000) for _ in range(num_tokens)],
        positions=list(range(num_tokens)),
        adapter_slots=[0 if num_adapters else -1] * num_tokens,
        sequences=[SequenceSpan(query_start=0, query_len=num_tokens, kv_len=num_tokens, block_table=blocks, place=0)],
        logits_rows=[num_tokens - 1],
    )
    experts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    layers = list(runner._layers.values())
    originals = [layer.experts.forward for layer in layers]

    def timed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            first, last = _events()
            first.record()
            result = forward(*args)
            last.record()
            experts.append((first, last))
            return result

        return run

    times, sums = [], []
    for repeat in range(4):
        experts.clear()
        for layer, original in zip(layers, originals, strict=True):
            layer.experts.forward = timed(original)  # type: ignore[method-assign]
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = runner.forward(batch, [num_tokens])
        assert logits is not None
        logits.argmax().item()
        if repeat:
            times.append((time.perf_counter() - start) * 1000)
            sums.append(sum(first.elapsed_time(last) for first, last in experts))
    for layer in layers:
        del layer.experts.forward
    return {
        "tokens": num_tokens,
        "adapters": num_adapters,
        "whole_ms": sorted(times)[1],
        "expert_layers_ms": sorted(sums)[1],
    }


def profile(runner: ModelRunner, batch: int, num_adapters: int) -> None:
    """Prints the kernels of a decode step by their time."""
    step = decode_batch(runner, batch, num_adapters)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            runner.forward(step, [batch])
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70)
    print(f"decode, batch {batch}, {num_adapters} adapters, 3 steps\n{table}")


def profile_host(runner: ModelRunner, num_tokens: int) -> None:
    """Prints where the host's time goes in a prefill."""
    profiler = cProfile.Profile()
    profiler.enable()
    time_prefill(runner, num_tokens, 1)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=qwen3_30b.NUM_LAYERS, help="fewer for a trial")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_cuda(parser)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as folder:
        model = Path(folder) / "model"
        qwen3_30b.write_model(model, num_layers=options.layers)
        settings = WorkerSettings(
            model=model, load_format="random", dtype="bfloat16", kv_cache_bytes=8 << 30, max_num_batched_tokens=16384
        )
        spec = load_spec_of_model(model)
        start = time.perf_counter()
        group = EPGroup.from_environment(settings)
        runner = ModelRunner(settings, spec, ExpertPlacement.make("linear", spec, 1), group)
        loaded = time.perf_counter()
        runner.warm_up()
        result: dict[str, object] = {
            "hardware": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__},
            "layers": options.layers,
            "load_seconds": loaded - start,
            "warm_up_seconds": time.perf_counter() - loaded,
        }
        steps, prefills = [], []
        # Prefills come after: what they leave in the cache would make all tokens of a step alike.
        for num_adapters in (0, NUM_ADAPTERS):
            for slot in range(num_adapters):
                adapter = make_adapter(options.layers, slot)
                for listener in runner.pool._listeners:
                    listener.set_adapter(slot, adapter)
                runner.pool._active = {**runner.pool._active, slot: adapter}
            for batch in (1, 8, 64):
                steps.append(time_decode(runner, batch, num_adapters))
                print(steps[-1], flush=True)
            if options.profile:
                profile(runner, 64, num_adapters)
        for num_adapters in (0, NUM_ADAPTERS):
            for num_tokens in (2048, 16384):
                prefills.append(time_prefill(runner, num_tokens, num_adapters))
                print(prefills[-1], flush=True)
        if options.profile:
            profile_host(runner, 2048)
        result["decode"], result["prefill"] = steps, prefills
        expert_bytes = runner.memory().base_expert_bytes
        result["floor_ms_batch_64_base"] = (expert_bytes + runner.memory().base_dense_bytes) / BYTES_PER_SECOND * 1000
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
