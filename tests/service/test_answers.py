"""Answers against PEFT's own: mixed batches, any number of ranks, any placement, real files of real writers."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from epilora.v1 import types_pb2
from tests.oracle import Oracle
from tests.service.harness import REPOSITORY, Service

DEMO = REPOSITORY / "examples" / "demo"
CHECKPOINT = DEMO / "checkpoint"
PER_EXPERT = DEMO / "per_expert_adapter"
NUM_TOKENS = 10
PROMPTS = ([5, 17, 40], [9, 3, 77, 12, 30, 6, 18, 44, 2], [21])
# 10 experts: neither 4 ranks nor 3 divide them.
EXPLICIT = {"all_layers": [[9, 0, 2, 4, 6], [1, 3, 5, 7, 8, 0]]}


@pytest.fixture(scope="session")
def fused_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter trained by the installed PEFT with target_parameters."""
    sys.path.insert(0, str(DEMO))
    try:
        import train_adapter
    finally:
        sys.path.remove(str(DEMO))
    output = tmp_path_factory.mktemp("fused")
    train_adapter.train_sailor(CHECKPOINT, output)
    return output


@pytest.fixture(scope="session")
def expected(fused_adapter: Path) -> dict[tuple[str, int], tuple[list[int], torch.Tensor]]:
    """PEFT's greedy tokens, and logits at every position that predicted something, by adapter and prompt."""
    oracles = {"": Oracle(CHECKPOINT), "fused": Oracle(CHECKPOINT, fused_adapter), "2d": Oracle(CHECKPOINT, PER_EXPERT)}
    answers = {}
    for name, oracle in oracles.items():
        for number, prompt in enumerate(PROMPTS):
            tokens = oracle.greedy(prompt, NUM_TOKENS)
            answers[name, number] = (tokens, oracle.logits(prompt + tokens[:-1]))
    return answers


def _rows(tensor: types_pb2.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(tensor.data, "<f4").reshape(tuple(tensor.shape))


def _ask(service: Service, prompt: list[int], adapter: str) -> tuple[list[int], np.ndarray]:  # type: ignore[type-arg]
    """Tokens, and logits at every position that predicted something."""
    messages = service.generate(prompt, adapter, max_tokens=NUM_TOKENS, return_logits=True, return_prompt_logits=True)
    prompt_rows = [_rows(m.prompt_logits) for m in messages if m.HasField("prompt_logits")]
    token_rows = [_rows(m.logits) for m in messages if m.HasField("logits")]
    # The last position of the prompt is also the one that chose the first token.
    logits = np.concatenate([*prompt_rows, *token_rows[1:]])
    return [token for message in messages for token in message.token_ids], logits


@pytest.mark.parametrize(
    ("ranks", "placement", "consensus"),
    [
        pytest.param(1, "linear", "auto", id="1 rank", marks=pytest.mark.soak),
        pytest.param(2, "round_robin", "gloo", id="2 ranks, round robin, gloo", marks=pytest.mark.soak),
        pytest.param(2, "explicit", "auto", id="2 ranks, explicit with a redundant expert"),
        pytest.param(4, "linear", "gloo", id="4 ranks, linear with a remainder, gloo"),
    ],
)
def test_a_mixed_batch_gives_pefts_tokens_and_logits(  # noqa: PLR0917 parameters and fixtures
    ranks: int,
    placement: str,
    consensus: str,
    expected: dict[tuple[str, int], tuple[list[int], torch.Tensor]],
    fused_adapter: Path,
    tmp_path: Path,
) -> None:
    if placement == "explicit":
        path = tmp_path / "placement.json"
        path.write_text(json.dumps(EXPLICIT))
        placement = str(path)
    roots = [fused_adapter.parent, DEMO]
    args, environment = [f"--placement={placement}"], {"EPILORA_CONSENSUS": consensus}
    with Service(CHECKPOINT, ranks=ranks, adapter_roots=roots, args=args, environment=environment) as service:
        service.load("fused", fused_adapter)
        service.load("2d", PER_EXPERT)
        with ThreadPoolExecutor(len(expected)) as pool:
            answers = {key: pool.submit(_ask, service, PROMPTS[key[1]], key[0]) for key in expected}
        for key, (tokens, logits) in expected.items():
            got_tokens, got_logits = answers[key].result()
            assert got_tokens == tokens, key
            assert np.abs(got_logits - logits.numpy()).max() < 1e-4, key


def test_the_three_answers_differ(expected: dict[tuple[str, int], tuple[list[int], torch.Tensor]]) -> None:
    """Otherwise the comparison above would not see a lost adapter."""
    for number in range(len(PROMPTS)):
        logits = [expected[name, number][1][len(PROMPTS[number]) - 1] for name in ("", "fused", "2d")]
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert (logits[first] - logits[second]).abs().max() > 0.1


RECORDED = {"qwen3moe-T": 24, "qwen2moe-T": 17, "mixtral-T": 18, "gptoss-T": 8, "deepseekv3-T": 5}
"""Adapters recorded for each model."""
EACH_RUN = [("qwen3moe-T", 2)]
OTHERS = [(model, ranks) for model in RECORDED for ranks in (1, 2, 3) if (model, ranks) not in EACH_RUN]
OTHERS += [("mixtral-T", 4)]


@pytest.mark.parametrize(
    ("model", "ranks"), [*EACH_RUN, *(pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS)]
)
def test_adapters_of_every_writer_give_their_recorded_logits(
    model: str, ranks: int, models: Path, adapters: Path
) -> None:
    sources = sorted(path for path in adapters.glob(f"*/{model}-*") if (path / "expected.safetensors").is_file())
    assert len(sources) == RECORDED[model], sources
    with Service(models / model, ranks=ranks, adapter_roots=[adapters]) as service:
        base = load_file(models / model / "expected.safetensors")
        _check_logits(service, "", base)
        for source in sources:
            name = f"{source.parent.name}-{source.name}"
            service.load(name, source)
            _check_logits(service, name, load_file(source / "expected.safetensors"))
        _check_logits(service, "", base)


def _check_logits(service: Service, adapter: str, recorded: dict[str, torch.Tensor]) -> None:
    ids = recorded["input_ids"][0].tolist()
    messages = service.generate(ids, adapter, max_tokens=1, return_prompt_logits=True)
    got = np.concatenate([_rows(m.prompt_logits) for m in messages if m.HasField("prompt_logits")])
    assert np.abs(got - recorded["logits"][0].numpy()).max() < 1e-4, adapter
