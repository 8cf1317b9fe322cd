"""The base weights of this rank that adapters are measured against, by the names that slices use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from compute_worker.dense_lora import plain_weight
from compute_worker.experts_base import projection_columns
from compute_worker.experts_modules import ExpertsTraits
from epilora.model_spec import ModelSpec

MatrixOf = Callable[[int, str, int], torch.Tensor]
"""(layer, attribute of its experts' module, logical expert) -> the expert's matrix as it is stored."""


class BaseWeights:
    """Views of the weights in memory; nothing is copied. See dora.WeightSource.

    Args:
        model: with LoraWeights attached.
        spec: its layers.
        matrix_of: finds the matrices of experts that are here, or come with a move.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, matrix_of: MatrixOf) -> None:
        self._model = model
        self._paths = {moe.layer: moe.module for moe in spec.moe_layers}
        self._matrix_of = matrix_of

    def dense(self, module: str) -> torch.Tensor:
        """[out, in] of a linear map; of an embedding, which is one from a one-hot vector, the transposed view."""
        owner = self._model.get_submodule(module)
        weight = plain_weight(owner)
        return weight.t() if isinstance(owner, nn.Embedding) else weight

    def has_bias(self, module: str) -> bool:
        """True if a linear map adds one."""
        return isinstance(getattr(self._model.get_submodule(module), "bias", None), torch.Tensor)

    def expert(self, layer: int, projection: str, expert: int) -> torch.Tensor:
        """[out, in] of a logical expert: the rows that one LoRA projection changes."""
        traits = ExpertsTraits.of(self._model.get_submodule(self._paths[layer]))
        assert traits is not None, layer
        attribute = "down_proj" if projection == "down" else traits.first_name
        matrix = self._matrix_of(layer, attribute, expert)
        weight_OI = matrix.t() if traits.is_transposed else matrix
        if projection == "down":
            return weight_OI
        return weight_OI[projection_columns(projection, traits.layout, weight_OI.shape[0])]
