"""Bytes that the ranks report: what the placement says, and what their processes really hold."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from tests.service.harness import Service, anonymous_bytes

NUM_LAYERS, NUM_EXPERTS, HIDDEN, INTERMEDIATE, LORA_RANK = 2, 9, 768, 768, 96
EXPERTS_OF_RANK = (5, 4)
FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 128 MB of experts, large enough that a process's growth shows them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the experts and q_proj, written by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(
        r=LORA_RANK,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    path = tmp_path_factory.mktemp("adapter")
    get_peft_model(base, config).save_pretrained(path)
    return path


def test_reported_bytes_are_the_placements_and_the_processes_own(model: Path, adapter: Path) -> None:
    per_expert = 3 * HIDDEN * INTERMEDIATE * FLOAT_BYTES
    # A [r, D] and B [2F, r] of gate_up, A [r, F] and B [D, r] of down.
    pair_bytes = LORA_RANK * (HIDDEN + 2 * INTERMEDIATE + INTERMEDIATE + HIDDEN) * FLOAT_BYTES
    dense_bytes = NUM_LAYERS * LORA_RANK * (HIDDEN + 2 * 16) * FLOAT_BYTES
    with Service(model, ranks=2, adapter_roots=[adapter.parent]) as service:
        pids = [service.worker_pid(rank) for rank in (0, 1)]
        for rank, memory in enumerate(service.memory()):
            expected = EXPERTS_OF_RANK[rank] * NUM_LAYERS * per_expert
            assert memory.base_expert_bytes == expected
            assert memory.base_expert_growth_bytes == pytest.approx(expected, rel=0.05)
            assert memory.adapter_bytes == 0
            assert not memory.adapters
        # The first request and load bring in code and buffers that stay.
        service.load("a", adapter)
        service.tokens([1, 2, 3], "a", max_tokens=2)
        service.unload("a")
        before = [anonymous_bytes(pid) for pid in pids]
        service.load("a", adapter)
        for rank, memory in enumerate(service.memory()):
            scales = EXPERTS_OF_RANK[rank] * NUM_LAYERS * 2 * FLOAT_BYTES
            (resident,) = memory.adapters
            assert resident.name == "a"
            assert resident.adapter_slot == 0
            assert resident.expert_bytes == EXPERTS_OF_RANK[rank] * NUM_LAYERS * pair_bytes + scales
            assert resident.dense_bytes == dense_bytes
            assert memory.adapter_bytes == resident.expert_bytes + resident.dense_bytes
            assert psutil.pid_exists(pids[rank])
            growth = anonymous_bytes(pids[rank]) - before[rank]
            assert growth == pytest.approx(memory.adapter_bytes, rel=0.05)
        service.unload("a")
        for rank, memory in enumerate(service.memory()):
            assert memory.adapter_bytes == 0
            assert anonymous_bytes(pids[rank]) - before[rank] < 0.05 * EXPERTS_OF_RANK[rank] * NUM_LAYERS * pair_bytes
