"""modules_to_save: dense modules of which an adapter holds the whole weight, as it was trained.

PEFT names them as the model does, `...mlp.gate.weight`, without a lora_A. The tokens of such an adapter use these
weights in place of the model's. Served are linear maps and embeddings of the model's own sizes: a router, mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epilora.adapters.normal_form import AdapterTarget, SavedModule
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.tensor_entry import TensorEntry
from epilora.errors import AdapterFormatError
from epilora.model_spec import DenseModuleSpec

_PREFIX = "base_model.model."
_KINDS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModules:
    """What was found among the tensors that are no half of a pair."""

    modules: dict[str, SavedModule]
    """By path in the model."""
    left_over: list[TensorEntry]


def find_saved_modules(
    tensors: Sequence[TensorEntry], target: AdapterTarget, config: PeftConfig, renamed: Callable[[str], str]
) -> SavedModules:
    """Finds the modules that modules_to_save names.

    Args:
        tensors: those that are no half of a pair.
        target: the model.
        config: adapter_config.json.
        renamed: path of a module in the file -> in the model.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH; UNSUPPORTED_ADAPTER (a bias without its weight).
    """
    found: dict[str, dict[str, TensorEntry]] = {}
    left_over = []
    for tensor in tensors:
        path, _, kind = tensor.name.removeprefix(_PREFIX).rpartition(".")
        dense = target.dense_modules.get(renamed(path))
        if dense is None or kind not in _KINDS or not config.saves(path):
            left_over.append(tensor)
            continue
        _check_shape(tensor, kind, dense, is_embedding=dense.module == target.family.embedding_path)
        other = found.setdefault(dense.module, {}).setdefault(kind, tensor)
        if other is not tensor:
            raise AdapterFormatError(
                f"{other.name} and {tensor.name} are for the same module of the model", reason="DUPLICATE_TENSOR"
            )
    for tensors_of_module in found.values():
        if "weight" not in tensors_of_module:
            raise AdapterFormatError(
                f"{tensors_of_module['bias'].name} is there without the weight of its module",
                reason="UNSUPPORTED_ADAPTER",
            )
    modules = {
        module: SavedModule(weight=found[module]["weight"], bias=found[module].get("bias"))
        for module in target.dense_modules
        if module in found
    }
    return SavedModules(modules=modules, left_over=left_over)


def check_all_saved(modules: Sequence[str], config: PeftConfig) -> None:
    """Every entry of modules_to_save has a module.

    Args:
        modules: paths of those that were found.
        config: adapter_config.json.

    Raises:
        AdapterFormatError: reason UNSUPPORTED_ADAPTER.
    """
    for name in config.modules_to_save:
        if not any(module.endswith(name) for module in modules):
            raise AdapterFormatError(
                f"adapter_config.json: modules_to_save names {name!r}, whole modules that replace the model's, but the "
                "file holds none that is a linear map or embedding of this model; such adapters are not supported",
                reason="UNSUPPORTED_ADAPTER",
                metadata={"config_field": "modules_to_save"},
            )


def _check_shape(tensor: TensorEntry, kind: str, dense: DenseModuleSpec, *, is_embedding: bool) -> None:
    sizes = (dense.in_features, dense.out_features) if is_embedding else (dense.out_features, dense.in_features)
    expected = sizes if kind == "weight" else (dense.out_features,)
    if tensor.shape != expected:
        raise AdapterFormatError(
            f"{tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}: modules_to_save of another size "
            "than the model's (a vocabulary with new tokens, or another model) are not supported",
            reason="SHAPE_MISMATCH",
            metadata={"tensor": tensor.name},
        )
