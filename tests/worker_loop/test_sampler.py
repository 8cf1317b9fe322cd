"""The next token: greedy, seeded, truncated."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from compute_worker.requests import GenerateRequest, OutputQueue, Sampling, Sequence
from compute_worker.sampler import Sampler


def _sequence(sampling: Sampling, prompt: tuple[int, ...] = (1, 2)) -> Sequence:
    request = GenerateRequest(request_id="r", token_ids=prompt, sampling=sampling)
    return Sequence(request=request, outputs=OutputQueue(Mock(spec=asyncio.AbstractEventLoop), 1))


LOGITS_V = torch.tensor([0.0, 3.0, 1.0, 2.0])


def test_temperature_zero_takes_the_largest() -> None:
    assert Sampler().sample(torch.stack([LOGITS_V, -LOGITS_V]), [_sequence(Sampling()), _sequence(Sampling())]) == [
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        pytest.param({"top_k": 2}, {1, 3}, id="top_k"),
        pytest.param({"top_k": 9}, {0, 1, 2, 3}, id="top_k past the vocabulary"),
        # Probabilities are 0.64, 0.24, 0.09, 0.03 for tokens 1, 3, 2, 0.
        pytest.param({"top_p": 0.5}, {1}, id="top_p keeps at least one"),
        pytest.param({"top_p": 0.7}, {1, 3}, id="top_p"),
        pytest.param({"top_k": 3, "top_p": 0.99}, {1, 2, 3}, id="both"),
    ],
)
def test_truncation(sampling: dict[str, float], allowed: set[int]) -> None:
    drawn = {
        Sampler().sample(LOGITS_V[None], [_sequence(Sampling(temperature=1.0, seed=seed, **sampling))])[0]  # type: ignore[arg-type]
        for seed in range(300)
    }
    assert drawn == allowed


def test_draws_follow_the_probabilities() -> None:
    counts = Counter(
        Sampler().sample(LOGITS_V[None], [_sequence(Sampling(temperature=2.0, seed=seed))])[0] for seed in range(4000)
    )
    expected_V = (LOGITS_V / 2).softmax(-1)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(expected_V[token].item(), abs=0.03)


def test_a_request_draws_the_same_alone_and_in_company_and_differs_by_position() -> None:
    flat_V = torch.zeros(1000)
    mine = Sampling(temperature=1.0, seed=42)
    alone = Sampler().sample(flat_V[None], [_sequence(mine)])
    others = [_sequence(Sampling(temperature=1.0, seed=s)) for s in (1, 2)]
    together = Sampler().sample(flat_V.expand(3, -1), [others[0], _sequence(mine), others[1]])
    later = Sampler().sample(flat_V[None], [_sequence(mine, prompt=(1, 2, 3))])
    assert together[1] == alone[0]
    assert later != alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_token_and_leave_others_alone(temperature: float) -> None:
    bad_NV = torch.stack([LOGITS_V, torch.full((4,), float("nan")), LOGITS_V.where(LOGITS_V < 3, float("inf"))])
    sequences = [_sequence(Sampling(temperature=temperature, seed=1)) for _ in range(3)]
    tokens = Sampler().sample(bad_NV, sequences)
    assert tokens[1:] == [None, None]
    assert tokens[0] == Sampler().sample(LOGITS_V[None], sequences[:1])[0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-5])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    options = Sampling(temperature=temperature, seed=1, top_k=3, top_p=0.9)
    assert Sampler().sample(1e4 * LOGITS_V[None], [_sequence(options)]) == [1]
