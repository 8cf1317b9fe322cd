"""DoRA, biases of lora_B and modules_to_save: what PEFT writes, read and run by us, gives PEFT's own logits.

PEFT has no DoRA for stacked experts. That of a single expert's projection is that of any linear map, and PEFT had it
where experts were linear maps: the reference merges it in float64.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worker_model_families import CONFIGS, family_config
from worker_model_files import write_adapter_slice
from worker_model_ranks import run_ranks
from worker_model_support import Prompt, Rank, prompt_tokens, reference_model, write_model

from compute_worker.dora import row_gain
from compute_worker.experts_modules import ExpertsTraits
from compute_worker.model_description import load_spec_of_model
from epilora.load_spec import MoEEPLoadSpec
from epilora.memory_plan import plan_memory, read_adapter
from epilora.model_spec import GateUpLayout, ModelSpec
from epilora.placement import ExpertPlacement
from tests.unit.epilora_adapters import write_adapter

peft = pytest.importorskip("peft")

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 5, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 20, "head_dim": 8},
    **{name: CONFIGS[name] for name in ("gpt_oss", "deepseek_v3", "qwen3_next", "jamba")},
}
TOKENS = prompt_tokens(2, 11)


def adapted_by_peft(model: Path, **options: Any) -> Any:
    """PEFT's model with an adapter whose every weight is drawn at random."""
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "init_lora_weights": False, **options})
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(reference_model(model), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
            elif "modules_to_save" in name or name.endswith("lora_B.default.bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return adapted


def _check_against_peft(tmp_path: Path, adapted: Any, model: Path, **settings: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([TOKENS])).logits[0]
    rank = Rank(model, work=tmp_path, **settings)
    (alone,) = rank.prefill([Prompt(tokens=TOKENS)])
    path = write_adapter_slice(tmp_path / "adapter", rank.spec, rank.load_spec, tmp_path / "slice")
    rank.stage(path, generation=1)
    rank.runner.pool.activate(1, 0)
    (resident,) = rank.runner.pool.residents()
    assert resident.expert_bytes + resident.dense_bytes == rank.runner.pool.num_bytes()
    _check_plan(tmp_path / "adapter", rank)
    with_adapter, without = rank.prefill([Prompt(tokens=TOKENS, slot=0), Prompt(tokens=TOKENS)])
    torch.testing.assert_close(with_adapter, expected, atol=1e-4, rtol=1e-4)
    assert (without - expected).abs().max() > 1e-2, "the adapter changes nothing: the test would prove nothing"
    # Same batch shape without the adapter: same bits.
    plain = rank.prefill([Prompt(tokens=TOKENS), Prompt(tokens=TOKENS)])
    assert torch.equal(without, plain[1])
    torch.testing.assert_close(without, alone, atol=1e-5, rtol=1e-5)


def _check_plan(adapter: Path, rank: Rank) -> None:
    """`epilora plan` counts what the worker holds."""
    form = read_adapter(adapter, rank.spec, max_lora_rank=64)
    plans = plan_memory(rank.spec, rank.placement, {"a": form}, element_bytes=4, num_sequences=1)
    (planned,) = plans[rank.group.ep_rank].adapters
    (resident,) = rank.runner.pool.residents()
    assert (planned.expert_bytes, planned.dense_bytes) == (resident.expert_bytes, resident.dense_bytes)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora on attention": ("qwen2_moe", {"use_dora": True, "target_modules": ["q_proj", "k_proj", "o_proj"]}),
    "dora with rslora and patterns": (
        "qwen3_moe",
        {
            "use_dora": True,
            "use_rslora": True,
            "target_modules": ["v_proj", "o_proj"],
            "rank_pattern": {"v_proj": 5},
            "alpha_pattern": {r"layers\.1\..*": 3},
        },
    ),
    "dora on maps with biases": ("gpt_oss", {"use_dora": True, "target_modules": ["q_proj", "o_proj"]}),
    "dora on a shared expert": ("qwen2_moe", {"use_dora": True, "target_modules": ["up_proj", "shared_expert_gate"]}),
    "dora on latent attention": ("deepseek_v3", {"use_dora": True, "target_modules": ["q_b_proj", "kv_b_proj"]}),
    "dora on a recurrent layer": (
        "qwen3_next",
        {"use_dora": True, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
    "a map of a recurrent layer": (
        "jamba",
        {"modules_to_save": ["x_proj"], "lora_bias": False, "target_modules": ["in_proj"]},
    ),
    "dora on embedding and lm_head": ("qwen3_moe", {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]}),
    "biases of lora_B": ("gpt_oss", {"lora_bias": True, "target_modules": ["q_proj", "o_proj"]}),
    "a router": ("qwen3_moe", {"modules_to_save": ["mlp.gate"], "target_modules": ["q_proj"]}),
    "a router with its bias": ("gpt_oss", {"modules_to_save": ["router"], "target_modules": ["q_proj"]}),
    "a router beside stacked experts": (
        "qwen2_moe",
        {"modules_to_save": ["mlp.gate"], "target_modules": [], "target_parameters": ["experts.down_proj"]},
    ),
    "a map of attention with its bias": ("qwen2_moe", {"modules_to_save": ["k_proj"], "target_modules": ["q_proj"]}),
    "embedding and lm_head": (
        "qwen3_moe",
        {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["q_proj"]},
    ),
    "a router beside dora": (
        "qwen3_moe",
        {"use_dora": True, "modules_to_save": ["mlp.gate"], "target_modules": ["q_proj"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_pefts(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    model = write_model(family_config(family, FAMILIES[family]), tmp_path / "model")
    _check_against_peft(tmp_path, adapted_by_peft(model, **options), model)


def test_gain_is_what_peft_multiplies_with() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(7, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, lora_alpha=3, use_dora=True, target_modules=["0"], init_lora_weights=False)
        adapted = peft.get_peft_model(nn.Sequential(plain), config).eval()
    layer = adapted.base_model.model[0]
    with torch.no_grad():
        layer.lora_magnitude_vector["default"].weight.uniform_(1, 2)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        gain = row_gain(plain.weight, a, b, 1.5, layer.lora_magnitude_vector["default"].weight)
        x = torch.randn(3, 7)
        expected = gain * (x @ plain.weight.t() + 1.5 * x @ a.t() @ b.t()) + plain.bias
        torch.testing.assert_close(adapted(x), expected)
    assert row_gain(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), torch.zeros(1, 1), 1.0, torch.tensor([10.0])) == 2


def expert_dora(spec: ModelSpec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """One pair and one magnitude for each projection of some experts, and the config."""
    generator = np.random.default_rng(4)
    tensors: dict[str, np.ndarray] = {}
    for moe in spec.moe_layers:
        inner, hidden = moe.intermediate_size, moe.hidden_size
        for expert in range(moe.num_experts):
            if expert == 1:
                continue
            for name, rows, columns in (
                ("gate_proj", inner, hidden),
                ("up_proj", inner, hidden),
                ("down_proj", hidden, inner),
            ):
                module = f"base_model.model.{moe.module}.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = generator.standard_normal((3, columns)).astype(np.float32) * 0.2
                tensors[f"{module}.lora_B.weight"] = generator.standard_normal((rows, 3)).astype(np.float32) * 0.2
                tensors[f"{module}.lora_magnitude_vector"] = generator.uniform(0.5, 2, rows).astype(np.float32)
    return tensors, {"r": 3, "lora_alpha": 6, "use_dora": True}


def _merged_logits(model: Path, spec: ModelSpec, tensors: dict[str, np.ndarray]) -> torch.Tensor:
    """float64 logits of transformers' model with DoRA merged into each expert's weights."""
    merged = reference_model(model).double()
    with torch.no_grad():
        for moe in spec.moe_layers:
            experts = merged.get_submodule(moe.module)
            traits = ExpertsTraits.of(experts)
            assert traits is not None
            for name, a in tensors.items():
                if moe.module + "." not in name or "lora_A" not in name:
                    continue
                expert, projection = name.split(moe.module + ".")[1].split(".")[:2]
                stacked = experts.down_proj if projection == "down_proj" else getattr(experts, traits.first_name)
                weight = stacked[int(expert)].t() if traits.is_transposed else stacked[int(expert)]
                rows = slice(None)
                if projection != "down_proj":
                    second, inner = int(projection == "up_proj"), moe.intermediate_size
                    concatenated = slice(second * inner, (second + 1) * inner)
                    rows = slice(second, None, 2) if traits.layout is GateUpLayout.INTERLEAVED else concatenated
                b = torch.from_numpy(tensors[name.replace("lora_A", "lora_B")]).double()
                magnitude = torch.from_numpy(tensors[name.replace("lora_A.weight", "lora_magnitude_vector")]).double()
                total = weight[rows] + 2.0 * b @ torch.from_numpy(a).double()
                weight[rows] = magnitude[:, None] * total / total.norm(dim=1, keepdim=True)
        return merged(input_ids=torch.tensor([TOKENS])).logits[0]


def _expert_logits(ep_rank: int, work: Path) -> dict[str, torch.Tensor]:
    """ "family backend" -> logits with the adapter, and of the base model in the same step."""
    num_ranks, results = int(work.name), {}
    for family in ("qwen3_moe", "gpt_oss"):
        for backend in ("loop", "grouped"):
            rank = Rank(work / family, work=work, num_ranks=num_ranks, placement="round_robin", expert_backend=backend)
            adapter = work / f"{family}-adapter"
            path = work / f"{family}-{backend}-slice-{ep_rank}"
            rank.stage(write_adapter_slice(adapter, rank.spec, rank.load_spec, path), generation=1)
            rank.runner.pool.activate(1, 0)
            if backend == "loop":
                _check_plan(adapter, rank)
            counts = [0] * (num_ranks - 1) + [2 * len(TOKENS)]
            for kind, slot in (("adapter", 0), ("base", -1)):
                rank.forget_blocks()
                prompts = [Prompt(tokens=TOKENS, slot=slot), Prompt(tokens=TOKENS)]
                logits = rank.prefill(prompts if ep_rank == num_ranks - 1 else [], counts)
                if logits:
                    results[f"{family} {backend} {kind}"], results[f"{family} {backend} beside {kind}"] = logits
        if num_ranks > 1:
            _move_experts(rank, adapter, path.with_suffix(".moved"))
            rank.forget_blocks()
            prompts = [Prompt(tokens=TOKENS, slot=0), Prompt(tokens=TOKENS)]
            logits = rank.prefill(prompts if ep_rank == num_ranks - 1 else [], counts)
            if logits:
                results[f"{family} moved"] = logits[0]
    return results


def _move_experts(rank: Rank, adapter: Path, path: Path) -> None:
    """To a linear placement, the adapter with them: what it is measured against comes with the move, in part."""
    mover, placement = rank.runner.mover, ExpertPlacement.make("linear", rank.spec, rank.group.num_ranks)
    mover.prepare(1, placement)
    load_spec = MoEEPLoadSpec.make(rank.spec, placement, rank.group.ep_rank)
    assert load_spec.layers[0].local_experts != rank.load_spec.layers[0].local_experts
    write_adapter_slice(adapter, rank.spec, load_spec, path)
    rank.runner.pool.stage(name="adapter-1", generation=1, path=path, placement_id=placement.placement_id)
    assert mover.promise(1)
    with torch.inference_mode():
        mover.place(1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dora_of_single_experts(tmp_path: Path, num_ranks: int) -> None:
    work = tmp_path / str(num_ranks)
    work.mkdir()
    expected = {}
    for family in ("qwen3_moe", "gpt_oss"):
        model = write_model(family_config(family, FAMILIES[family]), work / family)
        spec = load_spec_of_model(model)
        tensors, changes = expert_dora(spec)
        write_adapter(work / f"{family}-adapter", tensors, **changes)
        expected[family] = _merged_logits(model, spec, tensors).float()
    results = _expert_logits(0, work) if num_ranks == 1 else run_ranks(num_ranks, _expert_logits, work)[-1]
    for family, logits in expected.items():
        if num_ranks > 1:
            torch.testing.assert_close(results[f"{family} moved"], logits, atol=1e-4, rtol=1e-4)
        for backend in ("loop", "grouped"):
            got = results[f"{family} {backend} adapter"]
            torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)
            assert (results[f"{family} {backend} base"] - logits).abs().max() > 1e-2
            assert torch.equal(
                results[f"{family} {backend} beside adapter"], results[f"{family} {backend} beside base"]
            )
