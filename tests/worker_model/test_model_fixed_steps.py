"""The Triton backend in the whole model, and decode steps of fixed shapes: what a GPU replays as one graph.

On a CPU Triton's interpreter runs the same kernels, and fixed steps run as they are.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")
from test_model_dora import adapted_by_peft, expert_dora
from worker_model_families import family_config
from worker_model_files import write_adapter_slice
from worker_model_ranks import Results, run_ranks
from worker_model_support import (
    Adapter,
    Chunk,
    Prompt,
    Rank,
    prompt_tokens,
    random_adapter,
    reference_logits,
    small_config,
    write_model,
)

from compute_worker.experts_triton import TritonLayerExperts
from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import write_adapter

# Small: the interpreter takes a millisecond for each program of a launch.
CONFIG = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "hidden_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 1,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
PROMPTS = [Prompt(tokens=prompt_tokens(seed, 2 + seed % 3), slot=slot) for seed, slot in enumerate((-1, 0, 1, -1, 0))]


def adapters_of(spec: ModelSpec) -> list[Adapter]:
    return [
        random_adapter(spec, 1, rank_of={"gate_up": 4, "down": 3}),
        random_adapter(spec, 2, rank_of={"gate": 2, "up": 5, "down": 1}, vary_ranks=True),
    ]


def open_rank(work: Path, **settings: object) -> Rank:
    return Rank(
        work / "model", work=work, expert_backend="triton", device=DEVICE, **{"max_num_sequences": 8, **settings}
    )


def decode_last(rank: Rank, prompts: list[Prompt], shares: list[list[Prompt]] | None = None) -> list[torch.Tensor]:
    """Logits of each prompt's last token, as a decode step after a prefill of all before it.

    shares: the prompts of every rank; None: this is the only one.
    """
    shares = [prompts] if shares is None else shares
    chunks = [Chunk(prompt=p, start=0, stop=len(p.tokens) - 1, blocks=rank.blocks(len(p.tokens))) for p in prompts]
    rank.step(chunks, [sum(len(p.tokens) - 1 for p in share) for share in shares])
    last = [Chunk(prompt=c.prompt, start=c.stop, stop=c.stop + 1, blocks=c.blocks) for c in chunks]
    counts = [len(share) for share in shares]
    first = [logits[0].cpu() for logits in rank.step(last, counts)]
    # On a GPU the first such step is captured after it ran, and this one is its replay.
    again = [logits[0].cpu() for logits in rank.step(last, counts)]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    return again


def test_whole_prompts_agree_with_transformers(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **CONFIG), tmp_path / "model")
    rank = open_rank(tmp_path)
    adapters = adapters_of(rank.spec)
    for slot, adapter in enumerate(adapters):
        rank.add_adapter(adapter, slot=slot, work=tmp_path)
    assert isinstance(rank.runner._layers[0].experts, TritonLayerExperts)
    for prompt, logits in zip(PROMPTS, [logits.cpu() for logits in rank.prefill(PROMPTS)], strict=True):
        adapter = adapters[prompt.slot] if prompt.slot >= 0 else None
        expected = reference_logits(tmp_path / "model", adapter, rank.spec, prompt.tokens)
        torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_fixed_steps_agree_with_transformers_and_keep_base_bits(tmp_path: Path) -> None:
    # With shared experts and their gate.
    config = {**CONFIG, "shared_expert_intermediate_size": 16}
    del config["head_dim"]
    write_model(small_config("qwen2_moe", **config), tmp_path / "model")
    rank = open_rank(tmp_path)
    steps = rank.runner._decode_steps
    assert steps is not None
    ran: list[object] = []
    inner = steps._forward
    steps._forward = lambda inputs: (ran.append(steps._launch_key()), inner(inputs))[1]
    plain = decode_last(rank, [Prompt(tokens=prompt.tokens) for prompt in PROMPTS])
    rank.forget_blocks()
    adapters = adapters_of(rank.spec)
    for slot, adapter in enumerate(adapters):
        rank.add_adapter(adapter, slot=slot, work=tmp_path)
    mixed = decode_last(rank, PROMPTS)
    rank.forget_blocks()
    for prompt, logits, base in zip(PROMPTS, mixed, plain, strict=True):
        adapter = adapters[prompt.slot] if prompt.slot >= 0 else None
        expected = reference_logits(tmp_path / "model", adapter, rank.spec, prompt.tokens)[-1]
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        # The interpreter multiplies with the CPU's library, whose rounding may depend on a row's place.
        close = torch.equal(logits, base) if DEVICE == "cuda" else torch.allclose(logits, base, atol=1e-5, rtol=0)
        assert close == (prompt.slot == -1)
    for generation in (1, 2):
        rank.runner.pool.retire(generation)
    after = decode_last(rank, [Prompt(tokens=prompt.tokens) for prompt in PROMPTS])
    assert all(torch.equal(a, b) for a, b in zip(after, plain, strict=True))
    assert {"grouped", "loop"}.isdisjoint(rank.runner.num_expert_layers())
    kinds = [key is not None for key, _ in itertools.groupby(ran)]
    if DEVICE == "cuda":
        # Each kind ran once for itself and once to be captured; the base model's graph was still there at the end.
        assert kinds == [False, True]
        assert (steps.num_captured, steps.num_replayed) == (2, 4)
    else:
        assert kinds == [False, True, False]


def test_recurrent_layers_in_fixed_steps(tmp_path: Path) -> None:
    """Sequences that begin with one token beside others, step after step, with fewer places than rows of the bucket."""
    options = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    options |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "intermediate_size": 16}
    options |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    options |= {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    config = family_config("qwen3_next", {**CONFIG, **options})
    model = write_model(config, tmp_path / "model")
    rank = open_rank(tmp_path, max_num_sequences=5)
    adapter = random_adapter(rank.spec, 1, rank_of={"down": 3})
    rank.add_adapter(adapter, slot=0, work=tmp_path)
    for tensor in rank.runner._recurrent.cache.recurrent.values():
        tensor.fill_(float("nan"))
    prompts = [Prompt(tokens=prompt_tokens(seed, 5), slot=slot) for seed, slot in enumerate((-1, 0, 0))]
    blocks = [rank.blocks(5) for _ in prompts]
    rank.step([Chunk(prompt=prompts[0], start=0, stop=2, blocks=blocks[0])])
    before = rank.runner.num_steps_by_form()
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(2):
        starts = (2 + step, step, step)
        chunks = [
            Chunk(prompt=prompt, start=start, stop=start + 1, blocks=own)
            for prompt, start, own in zip(prompts, starts, blocks, strict=True)
        ]
        for into, logits in zip(got, rank.step(chunks), strict=True):
            into.append(logits.cpu())
    after = rank.runner.num_steps_by_form()
    assert after["eager"] == before["eager"]
    assert after["graph"] - before["graph"] == (1 if DEVICE == "cuda" else 0)
    for prompt, rows, first in zip(prompts, got, (2, 0, 0), strict=True):
        expected = reference_logits(model, adapter if prompt.slot == 0 else None, rank.spec, prompt.tokens)
        torch.testing.assert_close(torch.cat(rows), expected[first : first + 2], **TOLERANCE)


def test_an_adapter_of_attention_alone_leaves_the_experts_as_they_are(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **CONFIG), tmp_path / "model")
    rank = open_rank(tmp_path)
    adapter = random_adapter(rank.spec, 1, rank_of={})
    attention = Adapter(dense={name: pair for name, pair in adapter.dense.items() if "self_attn" in name})
    rank.add_adapter(attention, slot=0, work=tmp_path)
    prompts = [Prompt(tokens=p.tokens, slot=min(p.slot, 0)) for p in PROMPTS]
    for prompt, logits in zip(prompts, decode_last(rank, prompts), strict=True):
        used = attention if prompt.slot == 0 else None
        expected = reference_logits(tmp_path / "model", used, rank.spec, prompt.tokens)[-1]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_dora_and_a_whole_router_in_fixed_steps(tmp_path: Path) -> None:
    """Such a step runs as it is, without a graph; rows of the others keep the bits that they have in graphs."""
    model = write_model(small_config("qwen3_moe", **CONFIG), tmp_path / "model")
    adapted = adapted_by_peft(model, use_dora=True, target_modules=["q_proj", "lm_head"], modules_to_save=["mlp.gate"])
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    rank = open_rank(tmp_path)
    plain = decode_last(rank, [Prompt(tokens=prompt.tokens) for prompt in PROMPTS])
    rank.forget_blocks()
    write_adapter_slice(tmp_path / "adapter", rank.spec, rank.load_spec, tmp_path / "slice")
    rank.stage(tmp_path / "slice", generation=1)
    rank.runner.pool.activate(1, 0)
    before = rank.runner.num_steps_by_form()
    prompts = [Prompt(tokens=p.tokens, slot=min(p.slot, 0)) for p in PROMPTS]
    mixed = decode_last(rank, prompts)
    after = rank.runner.num_steps_by_form()
    assert (after["graph"], after["fixed"]) == (before["graph"], before["fixed"] + 2)
    for prompt, logits, base in zip(prompts, mixed, plain, strict=True):
        if prompt.slot < 0:
            close = torch.equal(logits, base) if DEVICE == "cuda" else torch.allclose(logits, base, atol=1e-5, rtol=0)
            assert close
            continue
        with torch.no_grad():
            expected = adapted(input_ids=torch.tensor([prompt.tokens])).logits[0, -1]
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert not torch.allclose(logits, base, atol=1e-2)


def test_dora_of_experts_is_refused_when_it_is_staged(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **CONFIG), tmp_path / "model")
    rank = open_rank(tmp_path)
    tensors, changes = expert_dora(rank.spec)
    adapter = write_adapter(tmp_path / "adapter", tensors, **changes)
    path = write_adapter_slice(adapter, rank.spec, rank.load_spec, tmp_path / "slice")
    with pytest.raises(InvalidArgumentError, match="EPILORA_EXPERT_BACKEND=grouped") as caught:
        rank.stage(path, generation=1)
    assert caught.value.reason == "UNSUPPORTED_ADAPTER"
    assert rank.runner.pool.residents() == []


def test_a_rank_beyond_the_kernels_is_refused_when_it_is_staged(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **CONFIG), tmp_path / "model")
    rank = open_rank(tmp_path)
    adapter = random_adapter(rank.spec, 1, rank_of={"down": 513}, dense=False)
    with pytest.raises(InvalidArgumentError, match="lora rank 513") as caught:
        rank.add_adapter(adapter, slot=0, work=tmp_path)
    assert caught.value.reason == "LORA_RANK_TOO_LARGE"
    assert rank.runner.pool.residents() == []


def test_widths_that_the_kernels_lack_are_refused(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe"), tmp_path / "model")
    with pytest.raises(InvalidArgumentError, match=r"widths \(32, 24\) are not multiples of 16"):
        open_rank(tmp_path)


def ranks_main(ep_rank: int, work: Path) -> Results:
    """Rank 1 has fewer sequences, then none."""
    rank = open_rank(work, num_ranks=2, placement="round_robin")
    for slot, adapter in enumerate(adapters_of(rank.spec)):
        rank.add_adapter(adapter, slot=slot, work=work)
    own = [PROMPTS[:3], PROMPTS[3:]][ep_rank]
    with ThreadPoolExecutor(1, initializer=rank.runner.enter_thread) as thread:
        # As in the service: built in one thread, stepped in another.
        return thread.submit(decode_both, rank, own, ep_rank).result()


def decode_both(rank: Rank, own: list[Prompt], ep_rank: int) -> Results:
    results = {"both": decode_last(rank, own, [PROMPTS[:3], PROMPTS[3:]])}
    results["alone"] = decode_last(rank, own if ep_rank == 0 else [], [PROMPTS[:3], []])
    results["beside a prompt"] = decode_beside_a_prompt(rank, ep_rank)
    return results


def decode_beside_a_prompt(rank: Rank, ep_rank: int) -> list[torch.Tensor]:
    """Rank 0 prefills a prompt, as it is, while rank 1 decodes with fixed shapes: one bucket for both."""
    rank.forget_blocks()
    decoding, prompt = PROMPTS[3:], PROMPTS[2]
    chunks = [Chunk(prompt=p, start=0, stop=len(p.tokens) - 1, blocks=rank.blocks(len(p.tokens))) for p in decoding]
    rank.step(chunks if ep_rank == 1 else [], [0, sum(chunk.stop for chunk in chunks)])
    counts = [len(prompt.tokens), len(decoding)]
    before = rank.runner.num_steps_by_form()
    if ep_rank == 0:
        logits = [rank.prefill([prompt], counts)[0][-1].cpu()]
    else:
        last = [Chunk(prompt=c.prompt, start=c.stop, stop=c.stop + 1, blocks=c.blocks) for c in chunks]
        logits = [logits[0].cpu() for logits in rank.step(last, counts)]
    after = rank.runner.num_steps_by_form()
    assert (after["eager"] > before["eager"]) == (ep_rank == 0), (before, after)
    return logits


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a GPU a rank, or none")
def test_two_ranks_pad_to_one_bucket(tmp_path: Path) -> None:
    write_model(small_config("qwen3_moe", **CONFIG), tmp_path / "model")
    spec = ModelSpec.from_directory(tmp_path / "model")
    adapters = adapters_of(spec)
    results = run_ranks(2, ranks_main, tmp_path)
    expected = [
        reference_logits(tmp_path / "model", adapters[p.slot] if p.slot >= 0 else None, spec, p.tokens)[-1]
        for p in PROMPTS
    ]
    for mine, other in zip(results[0]["both"] + results[1]["both"], expected, strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
    for mine, other in zip(results[0]["alone"], expected[:3], strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
    beside = [*results[0]["beside a prompt"], *results[1]["beside a prompt"]]
    for mine, other in zip(beside, expected[2:], strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
