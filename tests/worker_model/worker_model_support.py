"""Adapters written by hand as slice files, tiny checkpoints, and a runner that feeds whole prompts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from compute_worker.ep_group import EPGroup
from compute_worker.experts_modules import ExpertsTraits
from compute_worker.model_description import load_spec_of_model
from compute_worker.model_runner import ModelRunner, SequenceSpan, StepBatch
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import GateUpLayout, ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings
from epilora.slices import (
    LAYOUT_VERSION,
    SliceMetadata,
    SliceTensor,
    dense_tensor_name,
    expert_tensor_name,
    lay_out,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
BASE = -1


def small_config(family: str, **overrides: object) -> object:
    """A two-layer config of a family with 7 experts, which 2, 3 and 4 ranks do not divide."""
    moe = {"num_experts": 7, "moe_intermediate_size": 24, "intermediate_size": 40, "head_dim": 8}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**{**SMALL, **moe, **overrides})
    if family == "qwen2_moe":
        del moe["head_dim"]
        return Qwen2MoeConfig(**{**SMALL, **moe, "shared_expert_intermediate_size": 20, **overrides})
    if family == "mixtral":
        return MixtralConfig(**{**SMALL, "num_local_experts": 7, "intermediate_size": 24, **overrides})
    assert family == "olmoe", family
    return OlmoeConfig(**{**SMALL, "num_experts": 7, "intermediate_size": 24, **overrides})


def write_model(config: object, directory: Path, *, dtype: torch.dtype = torch.float32, **save: object) -> Path:
    """A checkpoint with random weights, as transformers writes it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory, **save)
    return directory


def reference_model(directory: Path) -> PreTrainedModel:
    """transformers' own model, with its plain loop over experts."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """a [r, in], b [out, r]; the delta of the weight is scale * b @ a."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def delta(self) -> torch.Tensor:
        return self.scale * self.b.float() @ self.a.float()


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Pairs by (layer, projection, logical expert), and by dense module."""

    experts: dict[tuple[int, str, int], Pair] = field(default_factory=dict)
    dense: dict[str, Pair] = field(default_factory=dict)


def random_adapter(
    spec: ModelSpec, seed: int, *, rank_of: Mapping[str, int], vary_ranks: bool = False, dense: bool = True
) -> Adapter:
    """Pairs for all experts of the projections in rank_of, and for all dense modules."""
    generator = torch.Generator().manual_seed(seed)

    def pair(out_features: int, in_features: int, rank: int) -> Pair:
        a = torch.randn((rank, in_features), generator=generator) / math.sqrt(in_features)
        b = torch.randn((out_features, rank), generator=generator) * 0.3
        return Pair(a=a, b=b, scale=0.5 + 0.25 * seed)

    adapter = Adapter()
    for moe in spec.moe_layers:
        width, hidden = moe.intermediate_size, moe.hidden_size
        for projection, rank in rank_of.items():
            shape = {"gate_up": (2 * width, hidden), "down": (hidden, width)}.get(projection, (width, hidden))
            for expert in range(moe.num_experts):
                own = (rank + expert) % 4 if vary_ranks else rank
                if own:
                    adapter.experts[moe.layer, projection, expert] = pair(*shape, own)
    if dense:
        for module in spec.dense_modules:
            adapter.dense[module.module] = pair(module.out_features, module.in_features, 2)
    return adapter


_PER_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def fixture_adapter(directory: Path, spec: ModelSpec) -> Adapter:
    """A PEFT adapter of tests/fixtures: modules per expert (0.17.1), or stacked parameters (0.19.1 and later)."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    adapter = Adapter()
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[key.replace(".lora_A.", ".lora_B.")]
        module = module.replace(".block_sparse_moe.", ".mlp.")
        expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)", module)
        stacked = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts(\.base_layer)?", module)
        if expert:
            place = (int(expert[1]), _PER_EXPERT[expert[3]], int(expert[2]))
            adapter.experts[place] = Pair(a=a, b=b, scale=_scale(config, key, a.shape[0]))
        elif stacked:
            _unstack(adapter, config, spec, int(stacked[1]), (a, b))
        else:
            adapter.dense[module] = Pair(a=a, b=b, scale=_scale(config, key, a.shape[0]))
    return adapter


def _unstack(
    adapter: Adapter, config: dict[str, Any], spec: ModelSpec, layer: int, pair: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A is expert-slowest, B expert-fastest."""
    moe = next(moe for moe in spec.moe_layers if moe.layer == layer)
    (a, b), num_experts = pair, moe.num_experts
    projection = "gate_up" if a.shape[1] == moe.hidden_size else "down"
    rank = a.shape[0] // num_experts
    scale = _scale(config, f"mlp.experts.{projection}_proj", rank)
    for expert in range(num_experts):
        adapter.experts[layer, projection, expert] = Pair(
            a=a[expert * rank : (expert + 1) * rank], b=b.view(-1, rank, num_experts)[:, :, expert], scale=scale
        )


def _scale(config: dict[str, Any], name: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in config["alpha_pattern"].items():
        if f".{pattern}." in f".{name}.":
            alpha = value
    return alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank


def write_slice(path: Path, adapter: Adapter, load_spec: MoEEPLoadSpec, *, dtype: str = "F32") -> Path:
    """One rank's slice file."""
    numpy_dtype = {"F32": "<f4", "F16": "<f2"}[dtype]
    arrays: dict[str, tuple[str, np.ndarray]] = {}  # type: ignore[type-arg]
    for layer in load_spec.layers:
        for projection in ("gate_up", "gate", "up", "down"):
            pairs = [adapter.experts.get((layer.moe.layer, projection, expert)) for expert in layer.local_experts]
            present = [pair for pair in pairs if pair is not None]
            if not present:
                continue
            name = {
                part: expert_tensor_name(layer.moe.layer, projection, part) for part in ("A", "B", "lora_rank", "scale")
            }  # type: ignore[arg-type]
            arrays[name["A"]] = (dtype, torch.cat([pair.a for pair in present]).numpy().astype(numpy_dtype))
            flat_b = torch.cat([pair.b.contiguous().flatten() for pair in present])
            arrays[name["B"]] = (dtype, flat_b.numpy().astype(numpy_dtype))
            ranks = [pair.a.shape[0] if pair else 0 for pair in pairs]
            arrays[name["lora_rank"]] = ("I32", np.array(ranks, "<i4"))
            arrays[name["scale"]] = ("F32", np.array([pair.scale if pair else 0.0 for pair in pairs], "<f4"))
    for module, pair in adapter.dense.items():
        arrays[dense_tensor_name(module, "A")] = (dtype, pair.a.numpy().astype(numpy_dtype))
        arrays[dense_tensor_name(module, "B")] = (dtype, pair.b.contiguous().numpy().astype(numpy_dtype))
        arrays[dense_tensor_name(module, "scale")] = ("F32", np.array([pair.scale], "<f4"))
    metadata = SliceMetadata(
        layout_version=LAYOUT_VERSION,
        model_digest=load_spec.model_digest,
        placement_id=load_spec.placement_id,
        ep_rank=load_spec.ep_rank,
    )
    layout = lay_out(
        [SliceTensor(name=name, dtype=kind, shape=array.shape) for name, (kind, array) in arrays.items()], metadata
    )
    content = bytearray(layout.size_bytes)
    content[: len(layout.header)] = layout.header
    for name, (_, array) in arrays.items():
        offset = layout.tensors[name].offset
        content[offset : offset + array.nbytes] = array.tobytes()
    path.write_bytes(content)
    return path


def merge_adapter(model: PreTrainedModel, adapter: Adapter, spec: ModelSpec) -> None:
    """Adds an adapter's deltas to transformers' own weights."""
    with torch.no_grad():
        for module, pair in adapter.dense.items():
            owner = model.get_submodule(module)
            owner.weight += pair.delta.t() if isinstance(owner, torch.nn.Embedding) else pair.delta
        for (layer, projection, expert), pair in adapter.experts.items():
            moe = next(moe for moe in spec.moe_layers if moe.layer == layer)
            experts = model.get_submodule(moe.module)
            traits = ExpertsTraits.of(experts)
            assert traits is not None
            weight = (experts.down_proj if projection == "down" else getattr(experts, traits.first_name))[expert]
            weight = weight.t() if traits.is_transposed else weight
            rows = slice(None)
            if projection in ("gate", "up") and traits.has_gate:
                start, inner = int(projection == "up"), moe.intermediate_size
                interleaved = traits.layout is GateUpLayout.INTERLEAVED
                rows = slice(start, None, 2) if interleaved else slice(start * inner, (start + 1) * inner)
            weight[rows] += pair.delta


def reference_logits(directory: Path, adapter: Adapter | None, spec: ModelSpec, prompt: Sequence[int]) -> torch.Tensor:
    """[len(prompt), V] of transformers' model with merged deltas."""
    model = reference_model(directory)
    if adapter is not None:
        merge_adapter(model, adapter, spec)
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(prompt)])).logits[0]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens and the adapter slot they use."""

    tokens: Sequence[int]
    slot: int = BASE


class Rank:
    """A runner of one rank, with adapters in slots 0, 1, ... and cache blocks given out in turn."""

    def __init__(
        self,
        model: Path,
        *,
        work: Path,
        placement: str = "linear",
        num_ranks: int = 1,
        adapters: Sequence[Adapter] = (),
        group: EPGroup | None = None,
        **settings: object,
    ) -> None:
        self.settings = WorkerSettings(
            model=model,
            num_ranks=num_ranks,
            **{"kv_cache_bytes": 1 << 20, "kv_block_size": 4, "device": "cpu", **settings},
        )  # type: ignore[arg-type]
        self.group = group or EPGroup.from_environment(self.settings)
        self.spec = load_spec_of_model(model)
        self.placement = ExpertPlacement.make(placement, self.spec, num_ranks // self.group.expert_tp)
        self.load_spec = MoEEPLoadSpec.make(self.spec, self.placement, self.group.placement_rank)
        self.runner = ModelRunner(self.settings, self.spec, self.placement, self.group)
        self._next_block = 1
        self._place_of: dict[tuple[int, ...], int] = {}
        for slot, adapter in enumerate(adapters):
            self.add_adapter(adapter, slot=slot, work=work)

    def add_adapter(self, adapter: Adapter, *, slot: int, work: Path) -> None:
        """Stages and activates an adapter; its generation is slot + 1."""
        path = write_slice(work / f"adapter-{slot}-rank-{self.group.ep_rank}", adapter, self.load_spec)
        self.stage(path, generation=slot + 1)
        self.runner.pool.activate(slot + 1, slot)

    def stage(self, path: Path, *, generation: int) -> int:
        return self.runner.pool.stage(
            name=f"adapter-{generation}",
            generation=generation,
            path=path,
            placement_id=self.placement.placement_id,
        )

    def forget_blocks(self) -> None:
        """Gives all cache blocks and places back."""
        self._next_block = 1
        self._place_of.clear()

    def blocks(self, num_positions: int) -> tuple[int, ...]:
        """Blocks for one more sequence, out of order."""
        count = -(-num_positions // self.runner.kv_block_size)
        blocks = range(self._next_block, self._next_block + count)
        self._next_block += count
        assert self._next_block <= self.runner.num_kv_blocks
        return tuple(reversed(blocks))

    def prefill(
        self, prompts: Sequence[Prompt], num_tokens_per_rank: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Logits [len, V] of each whole prompt, all in one step."""
        chunks = [
            Chunk(prompt=prompt, start=0, stop=len(prompt.tokens), blocks=self.blocks(len(prompt.tokens)))
            for prompt in prompts
        ]
        return self.step(chunks, num_tokens_per_rank)

    def step(self, chunks: Sequence[Chunk], num_tokens_per_rank: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Logits [stop - start, V] of each chunk."""
        for chunk in chunks:
            self._place_of.setdefault(chunk.blocks, len(self._place_of))
        batch = make_batch(chunks, self._place_of)
        logits = self.runner.forward(batch, num_tokens_per_rank or [len(batch.token_ids) if batch else 0])
        if logits is None:
            return []
        return list(logits.split([chunk.stop - chunk.start for chunk in chunks]))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Positions start..stop-1 of a prompt."""

    prompt: Prompt
    start: int
    stop: int
    blocks: tuple[int, ...]


def make_batch(chunks: Sequence[Chunk], place_of: Mapping[tuple[int, ...], int]) -> StepBatch | None:
    """One step; None without chunks. A sequence's place goes by its blocks."""
    if not chunks:
        return None
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans = []
    for chunk in chunks:
        length = chunk.stop - chunk.start
        spans.append(
            SequenceSpan(
                query_start=len(tokens),
                query_len=length,
                kv_len=chunk.stop,
                block_table=chunk.blocks,
                place=place_of[chunk.blocks],
            )
        )
        tokens += chunk.prompt.tokens[chunk.start : chunk.stop]
        positions += range(chunk.start, chunk.stop)
        slots += [chunk.prompt.slot] * length
    return StepBatch(
        token_ids=tokens,
        positions=positions,
        adapter_slots=slots,
        sequences=spans,
        logits_rows=list(range(len(tokens))),
    )


def prompt_tokens(seed: int, length: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 64, length).tolist()
