"""The expert layer with LoRA: route, two GEMMs, activation, combine; every launch shape is known on the host.

Split path (decode; at most six launches):
    route | gate/up GEMM + A shrinks | activation + B | down GEMM + A shrink | [grouped down B] | combine + B
Fused path (prefill):
    route | lists of columns, A shrinks | gate/up GEMM + B + activation | A shrink | down GEMM + B | combine

Legend: T tokens, K experts per token, n = T * K rows, e local experts, D model dim, F expert dim, R lora rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from compute_worker.kernels.activation import activation_kernel
from compute_worker.kernels.adapter_table import AdapterTable
from compute_worker.kernels.combine import combine_kernel, expand_down_kernel
from compute_worker.kernels.config import GemmTile, MoEConfig, choose_config
from compute_worker.kernels.delta_columns import Columns
from compute_worker.kernels.gemm import expert_gemm_kernel, gate_up_act_kernel, shrink_kernel
from compute_worker.kernels.layout import MoEWeights
from compute_worker.kernels.route import build_route, max_base_tiles, max_pair_tiles, unsorted_route
from compute_worker.kernels.step import Step


def moe(
    x_TD: torch.Tensor,
    topk_expert_TK: torch.Tensor,
    topk_weight_TK: torch.Tensor,
    adapter_slot_T: torch.Tensor,
    weights: MoEWeights,
    adapter_table: AdapterTable | None = None,
    *,
    config: MoEConfig | None = None,
) -> torch.Tensor:
    """One expert layer over this rank's local experts, with each token's own adapter.

    Semantics: y[t] = sum over k of weight[t, k] * expert(topk_expert[t, k], adapter_slot[t])(x[t]).

    x_TD: [T, D], the weights' dtype. topk_expert_TK: int32 or int64 [T, K], local slot ids, -1 where the expert lives
    elsewhere (that row adds nothing). topk_weight_TK: float [T, K]. adapter_slot_T: int32 or int64 [T], -1 for the base
    model; a slot that adapter_table does not have answers NaN, never the base model. All contiguous, on one device.
    Returns y [T, D] in x's dtype; sums are fp32, the gate/up result and the expert outputs are rounded to x's dtype.
    Never waits for the device; allocates its scratch from the current stream's pool, so it may run under capture.
    """
    _check(x_TD, topk_expert_TK, topk_weight_TK, adapter_slot_T, weights, adapter_table)
    num_tokens, top_k = topk_expert_TK.shape
    if num_tokens == 0:
        return torch.empty_like(x_TD)
    if config is None:
        config = choose_config(weights, num_tokens=num_tokens, top_k=top_k, device_name=_device_name(x_TD.device))
    num_slots = adapter_table.num_slots if adapter_table else 0
    e, n = weights.num_experts, num_tokens * top_k
    direct = n if num_tokens == 1 else 0
    extra_m = config.lora_extra_m if adapter_table else config.extra_m
    pdl = config.base_pdl if config.fused and adapter_table is None else config.pdl
    pdl = pdl and has_dependent_launch(x_TD.device)
    if direct:
        route = unsorted_route(topk_expert_TK, adapter_slot_T)
    else:
        route = build_route(
            topk_expert_TK, adapter_slot_T, num_experts=e, num_slots=num_slots, block_m=config.block_m,
            pair_block_m=config.pair_block_m, extra_m=extra_m, pdl=pdl,
        )  # fmt: skip
    step = Step(
        x_TD=x_TD, topk_expert_TK=topk_expert_TK, topk_weight_TK=topk_weight_TK, adapter_slot_T=adapter_slot_T,
        weights=weights, table=adapter_table, config=config, route=route, num_rows=n,
        base_tiles=direct or max_base_tiles(n, e, config.block_m),
        pair_tiles=direct or max_pair_tiles(n, e, num_slots, config.pair_block_m), direct=direct,
        extra_m=extra_m, pdl=pdl,
    )  # fmt: skip
    lists = _empty_lists(step)
    act_nF = _gate_up_fused(step, top_k, lists) if config.fused else _gate_up_split(step, top_k, lists)
    y_nD, down_s = _down(step, act_nF, lists)
    return _combine(step, y_nD, down_s)


def _gate_up_split(step: Step, top_k: int, lists: _Lists) -> torch.Tensor:
    """act [n, F]: GEMM with the shrinks in its grid, then activation with the expands."""
    w, table = step.weights, step.table
    f, config = w.intermediate_size, step.config
    gated = w.activation.gated
    gate_up = step.empty(step.num_rows, w.gate_up_eND.shape[1])
    s = step.shrunk(2)
    first_proj, num_proj = (0, 2) if gated else (1, 1)
    # Without a gate the only column is `up`; its shrink result then takes the place of the second site.
    s_gemm = s if gated or table is None else s[1]
    _gemm(step, step.x_TD, w.gate_up_eND, w.gate_up_bias_eN, gate_up, s_gemm, config.gate_up, top_k, first_proj,
          num_proj, lists.gate_up)  # fmt: skip
    act = step.empty(step.num_rows, f)
    activation_kernel[(triton.cdiv(f, config.block_f * config.span), step.pair_tiles)](
        gate_up, act, s, step.route, step.pointers, w.num_experts, step.slots_1, step.num_rows, step.s_stride,
        w.swiglu_alpha, w.swiglu_limit, F=f, GATED=gated, INTERLEAVED=w.interleaved, ACTIVATION=int(w.activation),
        HAS_LORA=table is not None, BLOCK_M=config.pair_block_m, BLOCK_F=config.block_f,
        SPAN_F=config.block_f * config.span, BLOCK_R=step.block_r, STAGES=3 if config.span > 1 else 1,
        DIRECT=step.direct, num_warps=config.act_warps, **step.launch,
    )  # fmt: skip
    return act


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lists:
    """What the epilogues add to each base tile; the launch of the gate and up shrinks writes both."""

    gate_up: Columns
    down: Columns


def _empty_lists(step: Step) -> _Lists:
    """Where no kernel reads a list, some other tensor stands in."""
    nothing = Columns(step.route.header, step.route.header)
    if step.table is None or not step.config.fused:
        return _Lists(gate_up=nothing, down=nothing)
    tiles, device = step.base_tiles, step.x_TD.device
    gate_up, down = (
        Columns(
            torch.empty(tiles, dtype=torch.int32, device=device),
            torch.empty((tiles, step.max_groups, num_proj, 2), dtype=torch.int64, device=device),
        )
        for num_proj in (2, 1)
    )
    return _Lists(gate_up=gate_up, down=down)


def _gate_up_fused(step: Step, top_k: int, lists: _Lists) -> torch.Tensor:
    """act [n, F]: shrinks alone, then one GEMM whose epilogue expands and activates."""
    w, config, tile = step.weights, step.config, step.config.gate_up
    if not w.activation.gated:
        raise ValueError(f"the fused path needs a gated activation, got {w.activation.name}: use a split configuration")
    s = step.shrunk(2)
    if step.table is not None:
        _shrink(step, step.x_TD, s, top_k, 0, 2, config.shrink_splits, lists, writes_lists=True)
    f, d = w.intermediate_size, w.hidden_size
    act = step.empty(step.num_rows, f)
    tma = tile.tma and not w.interleaved and f % tile.block_n == 0
    # From 64 rows on the columns of a product lie in each thread's registers, so that gate and up part for nothing.
    # Deltas want two accumulators from the start: parted before them, they cost more than one product saves.
    wide = tma and config.block_m >= 64 and step.table is None
    gate_up_act_kernel[(step.base_tiles * step.gate_up_blocks,)](
        step.x_TD, _gate_up_weight(w.gate_up_eND, tile, tma, wide), _weight(w.gate_up_eND, tile, tma),
        _bias(w.gate_up_bias_eN, act), act, s, step.route, step.pointers, lists.gate_up, w.num_experts, step.slots_1,
        step.num_rows, step.s_stride, step.max_groups, step.first_tiles,
        w.swiglu_alpha, w.swiglu_limit, F=f, K=d, TOP_K=top_k, INTERLEAVED=w.interleaved, ACTIVATION=int(w.activation),
        HAS_LORA=step.table is not None, HAS_BIAS=w.gate_up_bias_eN is not None, BLOCK_M=config.block_m,
        TAIL_M=config.tail_m, EXTRA_M=step.extra_m, BLOCK_F=tile.block_n, BLOCK_K=tile.block_k,
        STAGES=tile.num_stages, USE_TMA=tma, WIDE=wide, N_FASTEST=tile.n_fastest, COLUMNS=config.delta_columns,
        DIRECT=step.direct, EARLY=step.first_tiles > 0, num_warps=tile.num_warps, **step.launch,
    )  # fmt: skip
    return act


def _down(step: Step, act_nF: torch.Tensor, lists: _Lists) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [n, D] by position, shrink results that combine still has to expand)."""
    w, config = step.weights, step.config
    y = step.empty(step.num_rows, w.hidden_size)
    s = step.shrunk(1)
    if step.table is None:
        _gemm(step, act_nF, w.down_eDF, w.down_bias_eD, y, s, config.down, 0, 2, 0, lists.down)
    elif config.expand_down == "epilogue":
        _shrink(step, act_nF, s, 0, 2, 1, config.down_shrink_splits, lists)
        _gemm(step, act_nF, w.down_eDF, w.down_bias_eD, y, s, config.down, 0, 2, 0, lists.down, expands=True)
    else:
        _gemm(step, act_nF, w.down_eDF, w.down_bias_eD, y, s, config.down, 0, 2, 1, lists.down)
        if config.expand_down == "grouped":
            block_d = min(128, triton.next_power_of_2(w.hidden_size))
            expand_down_kernel[(triton.cdiv(w.hidden_size, block_d * config.span), step.pair_tiles)](
                y, s, step.route, step.pointers, w.num_experts, step.slots_1, step.s_stride, D=w.hidden_size,
                BLOCK_M=config.pair_block_m, BLOCK_D=block_d, SPAN_D=block_d * config.span, BLOCK_R=step.block_r,
                STAGES=3 if config.span > 1 else 1, DIRECT=step.direct, num_warps=4, **step.launch,
            )  # fmt: skip
    return y, s


def _combine(step: Step, y_nD: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    w, config = step.weights, step.config
    num_tokens, top_k = step.topk_expert_TK.shape
    expands = step.table is not None and config.expand_down == "combine"
    # A plain sum wants long rows; with expands the tile of B is BLOCK_D x BLOCK_R for each k.
    block_r = step.block_r if expands else 16
    block_d = max(16, config.block_d * 16 // block_r) if expands else min(1024, triton.next_power_of_2(w.hidden_size))
    y_TD = torch.empty_like(step.x_TD)
    combine_kernel[(num_tokens, triton.cdiv(w.hidden_size, block_d))](
        y_nD, step.topk_expert_TK, step.topk_weight_TK, step.adapter_slot_T, y_TD, s, step.route.row_pos,
        step.pointers, w.num_experts, step.slots_1 - 1, step.s_stride, D=w.hidden_size, TOP_K=top_k, HAS_LORA=expands,
        BLOCK_D=block_d, BLOCK_K=triton.next_power_of_2(top_k), BLOCK_R=block_r, DIRECT=step.direct,
        num_warps=config.combine_warps if expands else 4, **step.launch,
    )  # fmt: skip
    return y_TD


def _gemm(
    step: Step,
    x: torch.Tensor,
    weight_eNK: torch.Tensor,
    bias_eN: torch.Tensor | None,
    out: torch.Tensor,
    s: torch.Tensor,
    tile: GemmTile,
    top_k: int,
    shrink_proj: int,
    num_proj: int,
    columns: Columns,
    *,
    expands: bool = False,
) -> None:
    """Launch expert_gemm_kernel; shrinks (num_proj > 0) and expands need a table."""
    _, n, k = weight_eNK.shape
    num_proj = num_proj if step.table is not None else 0
    tma = tile.tma and n % tile.block_n == 0
    shrink = step.shrink_blocks(max(num_proj, 1))
    early = top_k == 0 and step.first_tiles > 0
    num_shrink = step.pair_tiles * num_proj * step.block_r // shrink["columns"]
    expert_gemm_kernel[(num_shrink + step.base_tiles * triton.cdiv(n, tile.block_n),)](
        x, _weight(weight_eNK, tile, tma), _bias(bias_eN, out), out, s, step.route, step.pointers,
        columns, num_shrink, step.weights.num_experts, step.slots_1, step.num_rows, step.s_stride,
        step.max_groups, step.first_tiles, step.gate_up_blocks, N=n, K=k, TOP_K=top_k,
        SHRINK_PROJ=shrink_proj, NUM_PROJ=num_proj, EXPANDS=expands, HAS_BIAS=bias_eN is not None,
        BLOCK_M=step.config.block_m, TAIL_M=step.config.tail_m, EXTRA_M=step.extra_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.num_stages, SWAP=tile.swap, USE_TMA=tma, N_FASTEST=tile.n_fastest,
        PAIR_BLOCK_M=step.config.pair_block_m, SHRINK_BLOCK_C=shrink["columns"], SHRINK_BLOCK_K=shrink["block_k"],
        SHRINK_NARROW_K=shrink["narrow_block_k"],
        SHRINK_STAGES=shrink["stages"], BLOCK_R=step.block_r, COLUMNS=step.config.delta_columns,
        DIRECT=step.direct, EARLY=early, num_warps=tile.num_warps, **step.launch,
    )  # fmt: skip


def _shrink(
    step: Step, x: torch.Tensor, s: torch.Tensor, top_k: int, first_proj: int, num_proj: int, splits: int,
    lists: _Lists, *, writes_lists: bool = False,
) -> None:  # fmt: skip
    """Launch shrink_kernel, which writes s and, if asked to, the lists of columns."""
    splits = 1 if step.direct else splits
    blocks = step.shrink_blocks(num_proj, splits)
    partial = torch.empty((splits, *s.shape), dtype=torch.float32, device=s.device) if splits > 1 else s
    num_shrinks = step.pair_tiles * splits * num_proj * step.block_r // blocks["columns"]
    shrink_kernel[(num_shrinks + (2 * step.base_tiles if writes_lists else 0),)](
        x, s, partial, step.route, step.pointers, lists.gate_up, lists.down, step.base_tiles, step.weights.num_experts,
        step.slots_1, step.num_rows, step.s_stride, step.max_groups, K=x.shape[1], TOP_K=top_k, FIRST_PROJ=first_proj,
        NUM_PROJ=num_proj, B_STEP=2 if step.weights.interleaved else 1, LISTS=writes_lists,
        BASE_BLOCK_M=triton.next_power_of_2(step.config.block_m + step.extra_m),
        PAIR_BLOCK_M=step.config.pair_block_m, BLOCK_C=blocks["columns"], BLOCK_K=blocks["block_k"],
        NARROW_BLOCK_K=blocks["narrow_block_k"], BLOCK_R=step.block_r, SPLITS=splits, STAGES=blocks["stages"],
        DIRECT=step.direct, num_warps=4, **step.launch,
    )  # fmt: skip


def _weight(weight_eNK: torch.Tensor, tile: GemmTile, tma: bool) -> Any:
    """The weights as a pointer or as a 2-d tensor descriptor over all experts' rows."""
    if not tma:
        return weight_eNK
    e, n, k = weight_eNK.shape
    return TensorDescriptor(weight_eNK, [e * n, k], [k, 1], [tile.block_n, tile.block_k])


def _gate_up_weight(weight_eND: torch.Tensor, tile: GemmTile, tma: bool, wide: bool) -> Any:
    """As `_weight`, or as a descriptor whose blocks hold gate rows and the up rows beside them."""
    if not wide:
        return _weight(weight_eND, tile, tma)
    e, n, k = weight_eND.shape
    halves = weight_eND.view(2 * e, n // 2, k)
    return TensorDescriptor(halves, list(halves.shape), [n // 2 * k, k, 1], [2, tile.block_n, tile.block_k])


def _bias(bias_eN: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """The bias; another tensor stands in where no kernel reads it."""
    return other if bias_eN is None else bias_eN


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may launch beside the one before: GPUs of compute capability 9.0 and later.

    "meta" stands for such a GPU, where kernels are only compiled.
    """
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _check(
    x_TD: torch.Tensor,
    topk_expert_TK: torch.Tensor,
    topk_weight_TK: torch.Tensor,
    adapter_slot_T: torch.Tensor,
    weights: MoEWeights,
    table: AdapterTable | None,
) -> None:
    t = x_TD.shape[0]
    if x_TD.dim() != 2 or x_TD.shape[1] != weights.hidden_size or x_TD.dtype != weights.gate_up_eND.dtype:
        raise ValueError(
            f"x: expected [T, {weights.hidden_size}] of {weights.gate_up_eND.dtype}, "
            f"got {tuple(x_TD.shape)} of {x_TD.dtype}"
        )
    if topk_expert_TK.dim() != 2 or topk_expert_TK.shape[0] != t or topk_weight_TK.shape != topk_expert_TK.shape:
        raise ValueError(
            f"top-k: expected ids and weights [{t}, K], "
            f"got {tuple(topk_expert_TK.shape)} and {tuple(topk_weight_TK.shape)}"
        )
    if adapter_slot_T.shape != (t,):
        raise ValueError(f"adapter_slot_T: expected [{t}], got {tuple(adapter_slot_T.shape)}")
    for name, tensor in (("x", x_TD), ("topk_expert", topk_expert_TK), ("topk_weight", topk_weight_TK),
                         ("adapter_slot", adapter_slot_T)):  # fmt: skip
        if not tensor.is_contiguous() or tensor.device != weights.gate_up_eND.device:
            raise ValueError(f"{name} must be contiguous on {weights.gate_up_eND.device}, got {tensor.device}")
    if table is not None:
        w = weights
        expected = (w.num_experts, w.hidden_size, w.intermediate_size, w.interleaved, w.activation.gated, x_TD.dtype)
        got = (
            table.num_experts,
            table.hidden_size,
            table.intermediate_size,
            table.interleaved,
            table.gated,
            table.dtype,
        )
        if got != expected:
            raise ValueError(
                f"adapter table is for (experts, D, F, interleaved, gated, dtype) {got}, the weights are {expected}"
            )
