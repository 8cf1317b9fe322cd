"""One adapter in every layout, served by a runner, against transformers' model in float64 with merged deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from worker_model_files import write_adapter_slice
from worker_model_support import Prompt, Rank

from compute_worker.experts_modules import ExpertsTraits
from epilora.model_spec import GateUpLayout, ModelSpec
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_layouts import magnitude_of, reference_deltas, tensors_of, with_dora

LORA_RANK = 3
DORA = " DoRA"
"""Ends the name of a layout whose pairs have magnitudes."""


def exact_logits(
    model: Path, spec: ModelSpec, tokens: Sequence[int], lora_rank: int = LORA_RANK, *, dora: bool = False
) -> torch.Tensor:
    """float64 [len(tokens), V] of the model with the reference deltas, and with DoRA's magnitudes of single experts."""
    whole = type(AutoConfig.from_pretrained(model)) not in MODEL_FOR_CAUSAL_LM_MAPPING
    merged = (
        (AutoModelForImageTextToText if whole else AutoModelForCausalLM)
        .from_pretrained(model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
        .eval()
    )
    with torch.no_grad():
        for (layer, projection, expert), delta in reference_deltas(spec, lora_rank).items():
            moe = next(moe for moe in spec.moe_layers if moe.layer == layer)
            module = merged.get_submodule(
                moe.module.replace("model.", "model.language_model.", 1) if whole else moe.module
            )
            traits = ExpertsTraits.of(module)
            assert traits is not None
            weight = (module.down_proj if projection == "down" else getattr(module, traits.first_name))[expert]
            weight = weight.t() if traits.is_transposed else weight
            rows = _rows(moe.intermediate_size, traits, projection)
            weight[rows] += torch.from_numpy(delta)
            if dora:
                magnitude = magnitude_of(f"base_model.model.{moe.module}.{expert}.{projection}_proj", delta.shape[0])
                weight[rows] *= (torch.from_numpy(magnitude) / weight[rows].norm(dim=1)).unsqueeze(1)
        return merged(input_ids=torch.tensor([list(tokens)])).logits[0]


def _rows(inner: int, traits: ExpertsTraits, projection: str) -> slice:
    if projection == "down" or not traits.has_gate:
        return slice(None)
    second = int(projection == "up")
    if traits.layout is GateUpLayout.INTERLEAVED:
        return slice(second, None, 2)
    return slice(second * inner, (second + 1) * inner)


def stage_layout(rank: Rank, layout: str, work: Path, *, lora_rank: int = LORA_RANK) -> None:
    """Writes the adapter, reads it, and puts it into slot 0 in place of the one before."""
    ep_rank = rank.group.ep_rank
    tensors, changes = tensors_of(rank.spec, layout.removesuffix(DORA), lora_rank)
    if layout.endswith(DORA):
        tensors, changes = with_dora(tensors), {**changes, "use_dora": True}
    name = layout.replace(" ", "-")
    adapter = write_adapter(work / f"{name}-{ep_rank}", tensors, **changes)
    path = work / f"slice-{name}-{ep_rank}"
    path.unlink(missing_ok=True)
    write_adapter_slice(adapter, rank.spec, rank.load_spec, path)
    generation = 1
    for resident in rank.runner.pool.residents():
        generation = resident.generation + 1
        rank.runner.pool.retire(resident.generation)
    rank.stage(path, generation=generation)
    rank.runner.pool.activate(generation, 0)


def layout_logits(
    rank: Rank, layout: str, tokens: Sequence[int], work: Path, *, lora_rank: int = LORA_RANK
) -> torch.Tensor | None:
    """Logits of a prompt that uses the adapter, on the last rank; the others join without tokens."""
    stage_layout(rank, layout, work, lora_rank=lora_rank)
    rank.forget_blocks()
    ranks = rank.group.num_ranks
    mine = [Prompt(tokens=tokens, slot=0)] if rank.group.ep_rank == ranks - 1 else []
    logits = rank.prefill(mine, [0] * (ranks - 1) + [len(tokens)])
    return logits[0] if logits else None


def explicit_placement(num_ranks: int) -> Mapping[str, Any]:
    """4 experts in reverse, expert 1 on every rank."""

    def experts_of(rank: int) -> list[int]:
        return [expert for expert in (3, 2, 1, 0) if expert % num_ranks == rank or expert == 1]

    return {"all_layers": [experts_of(rank) for rank in range(num_ranks)]}
