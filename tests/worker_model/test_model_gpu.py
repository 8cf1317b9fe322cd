"""The same checks on a GPU: logits in float32 and bfloat16, bits of base rows, memory, and two GPUs over NCCL."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from worker_model_families import CONFIGS, RECURRENT, family_config
from worker_model_ranks import Results, run_ranks
from worker_model_support import (
    FIXTURES,
    Chunk,
    Prompt,
    Rank,
    fixture_adapter,
    prompt_tokens,
    random_adapter,
    reference_logits,
    small_config,
    write_model,
)

from compute_worker.experts_grouped import GroupedBackend
from compute_worker.experts_torch import TorchLayerExperts
from epilora.model_spec import GateUpLayout, ModelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Widths of whole 16-byte lines in bfloat16, so that grouped_mm is used.
ALIGNED = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 13, "head_dim": 32}
PROMPTS = [Prompt(tokens=prompt_tokens(seed, 4 + 3 * seed), slot=slot) for seed, slot in enumerate((-1, 0, 1, -1, 0))]


def _open(work: Path, **settings: object) -> Rank:
    rank = Rank(work / "model", work=work, **{"device": "cuda", **settings})
    for slot, projections in enumerate(({"gate_up": 16, "down": 16}, {"gate": 3, "up": 5, "down": 2})):
        rank.add_adapter(random_adapter(rank.spec, slot + 1, rank_of=projections), slot=slot, work=work)
    return rank


def _expected(work: Path, spec: ModelSpec) -> list[torch.Tensor]:
    adapters = [
        random_adapter(spec, slot + 1, rank_of=projections)
        for slot, projections in enumerate(({"gate_up": 16, "down": 16}, {"gate": 3, "up": 5, "down": 2}))
    ]
    return [
        reference_logits(work / "model", adapters[p.slot] if p.slot >= 0 else None, spec, p.tokens) for p in PROMPTS
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_mixed_batch_and_bits(tmp_path: Path, backend: str, dtype: str) -> None:
    write_model(small_config("qwen3_moe", **ALIGNED), tmp_path / "model")
    rank = _open(tmp_path, expert_backend=backend, dtype=dtype)
    mixed = rank.prefill(PROMPTS)
    plain = rank.prefill([Prompt(tokens=prompt.tokens) for prompt in PROMPTS])
    for prompt, with_others, alone, expected in zip(PROMPTS, mixed, plain, _expected(tmp_path, rank.spec), strict=True):
        assert torch.equal(with_others, alone) == (prompt.slot == -1)
        if dtype == "float32":
            torch.testing.assert_close(with_others.cpu(), expected, atol=1e-4, rtol=1e-4)
        else:
            # Routing near a tie may differ in bfloat16, so the bulk counts.
            error = (with_others.cpu() - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.median() < 0.05, error


@pytest.mark.parametrize("name", ["qwen3moe-T-both", "qwen2moe-T-both", "mixtral-T-both"])
def test_fixture_adapters_in_float32(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file

    model = FIXTURES / "models" / f"{name.split('-', maxsplit=1)[0]}-T"
    path = FIXTURES / "adapters" / "peft-0.21.2" / name
    adapter = fixture_adapter(path, ModelSpec.from_directory(model))
    rank = Rank(model, work=tmp_path, adapters=[adapter], device="cuda")
    experts = rank.runner._layers[0].experts
    assert isinstance(experts, TorchLayerExperts)
    assert isinstance(experts.backend, GroupedBackend)
    recorded = load_file(path / "expected.safetensors")
    (logits,) = rank.prefill([Prompt(tokens=recorded["input_ids"][0].tolist(), slot=0)])
    torch.testing.assert_close(logits.cpu(), recorded["logits"][0], atol=1e-4, rtol=1e-4)


def test_device_memory_comes_back(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **ALIGNED), tmp_path / "model")
    rank = _open(tmp_path, dtype="bfloat16")
    # What tests before this one left must not go while this one counts.
    gc.collect()
    before = rank.runner.memory()
    adapter = random_adapter(rank.spec, 9, rank_of={"gate_up": 64, "down": 64})
    for _ in range(5):
        rank.add_adapter(adapter, slot=2, work=tmp_path)
        during = rank.runner.memory()
        assert (
            during.adapter_bytes - before.adapter_bytes <= during.device_allocated_bytes - before.device_allocated_bytes
        )
        rank.prefill([Prompt(tokens=prompt_tokens(1, 9), slot=2)])
        rank.runner.pool.retire(3)
        torch.cuda.synchronize()
        rank.prefill([Prompt(tokens=prompt_tokens(1, 9))])
    after = rank.runner.memory()
    assert after.adapter_bytes == before.adapter_bytes
    assert after.device_allocated_bytes - before.device_allocated_bytes < 1 << 20


def nccl_main(ep_rank: int, work: Path) -> Results:
    results: Results = {}
    for dtype in ("float32", "bfloat16"):
        rank = _open(work, num_ranks=2, placement="round_robin", dtype=dtype)
        own = [PROMPTS[:2], PROMPTS[2:]][ep_rank]
        counts = [sum(len(p.tokens) for p in part) for part in (PROMPTS[:2], PROMPTS[2:])]
        results[dtype] = [logits.cpu() for logits in rank.prefill(own, counts)]
        plain = rank.prefill([Prompt(tokens=prompt.tokens) for prompt in own], counts)
        results[dtype + " plain"] = [logits.cpu() for logits in plain]
        first = own if ep_rank == 0 else []
        results[dtype + " alone"] = [logits.cpu() for logits in rank.prefill(first, [counts[0], 0])]
    return results


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one_rank(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **ALIGNED), tmp_path / "model")
    results = run_ranks(2, nccl_main, tmp_path)
    expected = _expected(tmp_path, ModelSpec.from_directory(tmp_path / "model"))
    got = results[0]["float32"] + results[1]["float32"]
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    for mine, other in zip(results[0]["float32 alone"], expected[:2], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    for dtype in ("float32", "bfloat16"):
        mixed = results[0][dtype] + results[1][dtype]
        plain = results[0][dtype + " plain"] + results[1][dtype + " plain"]
        for prompt, with_others, alone in zip(PROMPTS, mixed, plain, strict=True):
            assert torch.equal(with_others, alone) == (prompt.slot == -1)


def _widths_of_the_kernels(name: str) -> dict[str, object]:
    """The family's tiny options with every width of experts and heads a multiple of 16."""
    options: dict[str, object] = {**CONFIGS[name], "hidden_size": 64, "intermediate_size": 32}
    for width, value in {"moe_intermediate_size": 32, "head_dim": 16}.items():
        if width in options:
            options[width] = value
    return options


@pytest.mark.parametrize("backend", ["grouped", "triton"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_equal_transformers(tmp_path: Path, name: str, backend: str) -> None:
    """Prompts in chunks, then decode steps, with an adapter on every linear map, and the bits of base rows."""
    options = _widths_of_the_kernels(name) if backend == "triton" else CONFIGS[name]
    model = write_model(family_config(name, options), tmp_path / "model")
    rank = Rank(model, work=tmp_path, device="cuda", dtype="float32", expert_backend=backend)
    spec = rank.spec
    gated = spec.moe_layers[0].gate_up_layout is not GateUpLayout.NOT_GATED
    adapter = random_adapter(spec, 1, rank_of={"gate_up": 3, "down": 2} if gated else {"down": 3})
    rank.add_adapter(adapter, slot=0, work=tmp_path)
    runs = []
    for slots in ((-1, 0, -1), (-1, -1, -1)):
        rank.forget_blocks()
        prompts = [Prompt(tokens=prompt_tokens(seed, 12), slot=slot) for seed, slot in enumerate(slots)]
        blocks = [rank.blocks(12) for _ in prompts]
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        for start, stop in ((0, 5), (5, 9), (9, 10), (10, 11), (11, 12)):
            chunks = [Chunk(prompt=p, start=start, stop=stop, blocks=b) for p, b in zip(prompts, blocks, strict=True)]
            for into, rows in zip(parts, rank.step(chunks), strict=True):
                into.append(rows.cpu())
        runs.append([torch.cat(rows) for rows in parts])
        for prompt, logits in zip(prompts, runs[-1], strict=True):
            expected = reference_logits(model, adapter if prompt.slot == 0 else None, spec, prompt.tokens)
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert [torch.equal(*pair) for pair in zip(*runs, strict=True)] == [True, False, True]
    # Two runs of three decode steps beside one resident adapter: the very first runs as it is, and is captured.
    assert rank.runner.num_steps_by_form().get("graph") == (5 if backend == "triton" else None)
