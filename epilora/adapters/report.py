"""The report of what was found in an adapter's files."""

from __future__ import annotations

from epilora.adapters.normal_form import NormalForm
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.safetensors_header import SafetensorsHeader
from epilora.v1 import types_pb2

_MAX_LISTED = 100
_MAX_NAME_LENGTH = 1024


def make_report(header: SafetensorsHeader, config: PeftConfig, form: NormalForm) -> types_pb2.AdapterLoadReport:
    """The report, without what only the build knows: bytes_read, cache_hit, and warnings about values."""
    ranks = [pair.lora_rank for pair in form.samples()]
    return types_pb2.AdapterLoadReport(
        expert_layout=form.expert_layout,
        producer=config.peft_version,
        num_tensors=len(header.tensors),
        num_tensors_used=form.num_used() + len(form.absent),
        ignored_tensors=form.ignored,
        expert_coverage=[
            types_pb2.ExpertCoverage(layer=layer, projection=projection.value, num_experts=len(by_expert))
            for (layer, projection), by_expert in form.experts.items()
        ],
        dense_modules=list(form.dense),
        warnings=form.warnings,
        file_bytes=header.file_bytes,
        min_lora_rank=min(ranks, default=0),
        max_lora_rank=max(ranks, default=0),
        file_dtype=", ".join(header.dtypes()),
        rank_differences=_listed(form.rank_differences),
        saved_modules=list(form.saved),
        base_model=config.base_model[:_MAX_NAME_LENGTH],
    )


def _listed(names: tuple[str, ...]) -> list[str]:
    if len(names) <= _MAX_LISTED:
        return list(names)
    return [*names[:_MAX_LISTED], f"and {len(names) - _MAX_LISTED} more"]
