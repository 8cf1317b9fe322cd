"""All recorded adapters, read by the loader's code and run by the worker's: the logits are those of their writers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from worker_model_files import write_adapter_slice
from worker_model_ranks import run_ranks
from worker_model_support import FIXTURES, Prompt, Rank

MODELS = ("qwen3moe", "qwen2moe", "mixtral", "gptoss", "deepseekv3")
ADAPTERS = sorted(path for path in FIXTURES.glob("adapters/*/*") if path.is_dir())


def _adapters_of(model: str) -> list[Path]:
    return [path for path in ADAPTERS if path.name.split("-")[0] == model]


def test_every_adapter_is_of_a_known_model() -> None:
    assert len(ADAPTERS) == 72
    assert sum(len(_adapters_of(model)) for model in MODELS) == 72


def _answers(rank: Rank, model: str, work: Path) -> Iterator[tuple[Path, torch.Tensor, torch.Tensor]]:
    """(adapter, its logits, the base's in the same step) of every adapter, one after the other in one slot."""
    ep_rank, num_ranks = rank.group.ep_rank, rank.group.num_ranks
    for number, path in enumerate(_adapters_of(model)):
        generation = number + 1
        rank.stage(
            write_adapter_slice(path, rank.spec, rank.load_spec, work / f"{model}-{number}-{ep_rank}"),
            generation=generation,
        )
        rank.runner.pool.activate(generation, 0)
        tokens = load_file(path / "expected.safetensors")["input_ids"][0].tolist()
        rank.forget_blocks()
        # The last rank has the tokens, the others join without.
        mine = [Prompt(tokens=tokens, slot=0), Prompt(tokens=tokens)] if ep_rank == num_ranks - 1 else []
        logits = rank.prefill(mine, [0] * (num_ranks - 1) + [2 * len(tokens)])
        rank.runner.pool.retire(generation)
        if logits:
            yield path, logits[0], logits[1]


def _check(answers: list[tuple[Path, torch.Tensor, torch.Tensor]], model: str) -> None:
    assert len(answers) == len(_adapters_of(model))
    base = load_file(FIXTURES / "models" / f"{model}-T" / "expected.safetensors")["logits"][0]
    for path, with_adapter, without in answers:
        expected = load_file(path / "expected.safetensors")["logits"][0]
        torch.testing.assert_close(with_adapter, expected, atol=1e-4, rtol=1e-4, msg=str(path))
        torch.testing.assert_close(without, base, atol=1e-5, rtol=1e-5, msg=str(path))
        assert (expected - base).abs().max() > 1e-3, path


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_gives_the_recorded_logits(model: str, tmp_path: Path) -> None:
    rank = Rank(FIXTURES / "models" / f"{model}-T", work=tmp_path)
    _check(list(_answers(rank, model, tmp_path)), model)


def _on_ranks(ep_rank: int, work: Path) -> dict[str, object]:
    num_ranks = int(work.name)
    results: dict[str, object] = {}
    for model in MODELS:
        rank = Rank(FIXTURES / "models" / f"{model}-T", work=work, num_ranks=num_ranks, placement="round_robin")
        results[model] = list(_answers(rank, model, work))
    return results


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_more_ranks_give_the_recorded_logits(num_ranks: int, tmp_path: Path) -> None:
    work = tmp_path / str(num_ranks)
    work.mkdir()
    results = run_ranks(num_ranks, _on_ranks, work)
    for model in MODELS:
        _check(results[-1][model], model)
