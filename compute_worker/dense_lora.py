"""LoRA on linear maps outside the routed experts: attention, router, shared experts, dense MLP, embedding, lm_head.

Each such module's weight becomes a LoraWeight, a parameter that adds the deltas of the step's adapters whenever it is
used in F.linear or F.embedding. So it works for nn.Linear, nn.Embedding and for routers that call F.linear on their
weight, cast or not, without touching the modules' code.

Legend: T tokens of the step, r lora rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class DensePair:
    """One adapter's pair for one module: a [r, in], b [out, r], on the device.

    Attributes:
        gain_O: float32 [out], DoRA's factor of base output and delta together; None without.
        offset_O: float32 [out], the scaled bias of lora_B; None without.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    gain_O: torch.Tensor | None = None
    offset_O: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeight:
    """What one adapter uses in place of a module's weight (as the module has it) and bias, on the device."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTokens:
    """The tokens of one adapter in this step.

    Attributes:
        token_index: int64 [n] into the step's tokens; None if all of them are the adapter's.
        pairs: the adapter's pairs and weights, by module path.
    """

    token_index: torch.Tensor | None
    pairs: Mapping[str, DensePair | DenseWeight]


class RowwiseDeltas(Protocol):
    """Deltas by the adapter slot of each row, without knowing on the host whose rows these are."""

    def add(self, module: str, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """What DenseLora.apply does."""
        ...

    def add_embedding(self, module: str, ids_T: torch.Tensor, y_TD: torch.Tensor) -> None:
        """What DenseLora.apply_embedding does."""
        ...


class DenseLora:
    """The deltas that apply now. One for a model; the step sets `adapters` and `logits_adapters` before it runs it.

    Attributes:
        adapters: tokens of each adapter in the step.
        logits_adapters: the same for the rows of `logits_module`, which sees only tokens whose logits are wanted.
        rowwise: for steps of fixed shapes: applies the deltas of all adapters but those of the two above.
        seen: collects the modules that came by, if it is a set.
    """

    def __init__(self, *, logits_module: str = "") -> None:
        self.adapters: Sequence[DenseTokens] = ()
        self.logits_adapters: Sequence[DenseTokens] = ()
        self.rowwise: RowwiseDeltas | None = None
        self.seen: set[str] | None = None
        self._logits_module = logits_module

    def attach(self, model: nn.Module, modules: Sequence[str]) -> None:
        """Makes the weights of the given modules LoraWeights."""
        for path in modules:
            module = model.get_submodule(path)
            weight = module.weight
            assert isinstance(weight, nn.Parameter), path
            module.weight = LoraWeight.make(weight, self, path)

    def apply(self, module: str, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Adds the deltas of this step's adapters to y = linear(x), in place; rows of other tokens are not touched.

        Semantics: y[t] += scale * B (A x[t]) for the tokens t of each adapter that has a pair for the module; with
        DoRA y[t] = gain * (y[t] - bias + scale * B (A x[t])) + bias; y[t] = W' x[t] + bias' for a weight of its own.

        Args:
            module: path.
            x: [..., in], tokens in the step's order.
            y: [..., out], contiguous.
            bias: [out], what y has of the module's own; None without.
        """
        if self.seen is not None:
            self.seen.add(module)
        if self.rowwise is not None:
            self.rowwise.add(module, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))
        for adapter in self.logits_adapters if module == self._logits_module else self.adapters:
            pair = adapter.pairs.get(module)
            if pair is None:
                continue
            x_TI, y_TO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            if adapter.token_index is None:
                y_TO.copy_(_adapted(x_TI, y_TO, bias, pair))
            else:
                y_nO = _adapted(x_TI[adapter.token_index], y_TO[adapter.token_index], bias, pair)
                y_TO.index_copy_(0, adapter.token_index, y_nO)

    def apply_embedding(self, module: str, ids: torch.Tensor, y: torch.Tensor) -> None:
        """Adds the deltas of this step's adapters to y = embedding(ids), in place.

        Semantics: y[t] += scale * B A[:, ids[t]] for the tokens t of each adapter that has a pair for the module.

        Args:
            module: path.
            ids: int64 [...], tokens in the step's order.
            y: [..., D], contiguous.
        """
        if self.seen is not None:
            self.seen.add(module)
        if self.rowwise is not None:
            self.rowwise.add_embedding(module, ids.reshape(-1), y.view(-1, y.shape[-1]))
        for adapter in self.adapters:
            pair = adapter.pairs.get(module)
            if pair is None:
                continue
            y_TD, ids_T = y.view(-1, y.shape[-1]), ids.reshape(-1)
            token_n = slice(None) if adapter.token_index is None else adapter.token_index
            if isinstance(pair, DenseWeight):
                y_TD[token_n] = pair.weight[ids_T[token_n]].to(y_TD.dtype)
            else:
                y_TD[token_n] = _plus_delta(y_TD[token_n], pair.a.t()[ids_T[token_n]], None, pair)


def plain_weight(module: nn.Module) -> torch.Tensor:
    """The weight of a module, without what a LoraWeight does."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), type(module)
    return weight._plain if isinstance(weight, LoraWeight) else weight.detach()


class LoraWeight(nn.Parameter):
    """A weight [out, in] that adds LoRA deltas where it is used in F.linear, or [in, out] in F.embedding."""

    _plain: torch.Tensor
    _lora: DenseLora
    _module: str

    @classmethod
    def make(cls, weight: torch.Tensor, lora: DenseLora, module: str) -> LoraWeight:
        """The same memory as `weight`, with deltas of `module`."""
        plain = weight.detach().as_subclass(torch.Tensor)
        made = torch.Tensor._make_subclass(cls, plain, False)
        made._plain, made._lora, made._module = plain, lora, module
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs `func` on the plain weight; adds deltas after F.linear, and keeps them through casts of the weight."""
        kwargs = kwargs or {}
        if func is F.linear and isinstance(weight := (args[1] if len(args) > 1 else kwargs["weight"]), LoraWeight):
            x = args[0] if args else kwargs["input"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            y = F.linear(x, weight._plain, bias)
            weight._lora.apply(weight._module, x, y, bias)
            return y
        if func is F.embedding and isinstance(weight := (args[1] if len(args) > 1 else kwargs["weight"]), LoraWeight):
            ids = args[0] if args else kwargs["input"]
            y = F.embedding(ids, weight._plain, *args[2:], **{k: v for k, v in kwargs.items() if k != "weight"})
            weight._lora.apply_embedding(weight._module, ids, y)
            return y
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        source = args[0] if args and isinstance(args[0], LoraWeight) else None
        is_cast = func in _CASTS and source is not None and isinstance(result, torch.Tensor)
        if is_cast and source is not None and hasattr(source, "_module") and result.shape == source.shape:
            return LoraWeight.make(result, source._lora, source._module)
        return result


_CASTS = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as}


def _adapted(
    x_nI: torch.Tensor, y_nO: torch.Tensor, bias_O: torch.Tensor | None, pair: DensePair | DenseWeight
) -> torch.Tensor:
    """The output of one adapter's tokens, rounded once to y's dtype; products accumulate in float32."""
    if isinstance(pair, DenseWeight):
        own_O = bias_O if pair.bias is None else pair.bias
        weight = pair.weight.to(torch.promote_types(x_nI.dtype, pair.weight.dtype))
        own_O = None if own_O is None else own_O.to(weight.dtype)
        return F.linear(x_nI.to(weight.dtype), weight, own_O).to(y_nO.dtype)
    dtype = torch.promote_types(y_nO.dtype, pair.a.dtype)
    return _plus_delta(y_nO, x_nI.to(dtype) @ pair.a.to(dtype).t(), bias_O, pair)


def _plus_delta(y_nO: torch.Tensor, h_nr: torch.Tensor, bias_O: torch.Tensor | None, pair: DensePair) -> torch.Tensor:
    """y + scale * B h, with gain and offset where the pair has them; rounded once to y's dtype."""
    dtype = torch.promote_types(y_nO.dtype, h_nr.dtype)
    if pair.gain_O is None and pair.offset_O is None:
        return torch.addmm(y_nO.to(dtype), h_nr.to(dtype), pair.b.to(dtype).t(), alpha=pair.scale).to(y_nO.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    bias = 0 if bias_O is None else bias_O.to(dtype)
    sum_nO = (y_nO.to(dtype) - bias) + pair.scale * (h_nr.to(dtype) @ pair.b.to(dtype).t())
    if pair.gain_O is not None:
        sum_nO *= pair.gain_O
    if pair.offset_O is not None:
        sum_nO += pair.offset_O
    return (sum_nO + bias).to(y_nO.dtype)
