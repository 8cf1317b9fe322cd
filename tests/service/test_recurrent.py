"""Families with recurrent layers through a whole service: PEFT's tokens and logits, in a batch of all kinds."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.oracle import Oracle
from tests.service.harness import Service
from tests.worker_model.worker_model_families import CONFIGS, family_config

NUM_TOKENS = 8
PROMPTS = ([5, 17, 40], [9, 3, 61, 12, 30, 6, 18, 44, 2, 50, 11, 7, 33], [21])
MODULES = {
    "qwen3_next": ["o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    "nemotron_h": ["o_proj", "in_proj"],
    "jamba": ["o_proj", "in_proj", "x_proj", "out_proj"],
}


def _write(name: str, work: Path) -> tuple[Path, Path]:
    """A checkpoint, and an adapter that PEFT writes for it."""
    import peft

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(family_config(name, CONFIGS[name]), dtype=torch.float32)
    model.save_pretrained(work / "model")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=MODULES[name], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, config).save_pretrained(work / "adapter")
    return work / "model", work / "adapter"


@pytest.mark.soak
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mixed_batch_gives_pefts_tokens_and_logits(name: str, ranks: int, tmp_path: Path) -> None:
    model, adapter = _write(name, tmp_path)
    oracles = {"": Oracle(model), "pair": Oracle(model, adapter)}
    # Prompts in chunks, and fewer places than requests.
    limits = {"EPILORA_MAX_NUM_BATCHED_TOKENS": "5", "EPILORA_MAX_NUM_SEQUENCES": "2"}
    with Service(model, ranks=ranks, adapter_roots=[tmp_path], environment=limits) as service:
        service.load("pair", adapter)
        asked = [(adapter_name, prompt) for prompt in PROMPTS for adapter_name in ("", "pair", "")]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(_ask, service, prompt, adapter_name) for adapter_name, prompt in asked]
        for (adapter_name, prompt), answer in zip(asked, answers, strict=True):
            tokens, logits = answer.result()
            oracle = oracles[adapter_name]
            assert tokens == oracle.greedy(prompt, NUM_TOKENS)
            expected = oracle.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
            assert np.abs(logits - expected.numpy()).max() < 1e-4
        assert all(rank.state_cache_bytes > 0 for rank in service.memory())


def _ask(service: Service, prompt: list[int], adapter: str) -> tuple[list[int], np.ndarray]:  # type: ignore[type-arg]
    messages = service.generate(prompt, adapter, max_tokens=NUM_TOKENS, return_logits=True)
    rows = [
        np.frombuffer(m.logits.data, "<f4").reshape(tuple(m.logits.shape)) for m in messages if m.HasField("logits")
    ]
    return [token for message in messages for token in message.token_ids], np.concatenate(rows)
