"""modules_to_save: dense modules of which an adapter holds the whole weight, as it was trained.

PEFT names them as the model does, `...mlp.gate.weight`, without a lora_A. The tokens of such an adapter use these
weights in place of the model's. Served are linear maps and embeddings of the model's own sizes: a router, mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epilora.adapters.keys import named
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
    tensors: Sequence[TensorEntry],
    target: AdapterTarget,
    config: PeftConfig,
    renamed: Callable[[str], str],
    *,
    allow_partial: bool,
) -> SavedModules:
    """Finds the modules that modules_to_save names.

    Args:
        tensors: those that are no half of a pair.
        target: the model.
        config: adapter_config.json.
        renamed: path of a module in the file -> in the model.
        allow_partial: leave out modules that cannot be replaced, each as a whole.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH; UNSUPPORTED_ADAPTER (a bias without its weight, a module that cannot be
            replaced, or only in part).
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
    _check_left_over(left_over, found, config, renamed, allow_partial)
    modules = {
        module: SavedModule(weight=found[module]["weight"], bias=found[module].get("bias"))
        for module in target.dense_modules
        if module in found
    }
    return SavedModules(modules=modules, left_over=left_over)


def _check_left_over(
    left_over: Sequence[TensorEntry],
    found: Mapping[str, Mapping[str, TensorEntry]],
    config: PeftConfig,
    renamed: Callable[[str], str],
    allow_partial: bool,
) -> None:
    """Modules that cannot be replaced are refused or left out; one of which a part can be, is refused."""
    others: dict[str, TensorEntry] = {}
    for tensor in left_over:
        module = _saved_part(tensor.name.removeprefix(_PREFIX).rpartition(".")[0], config)
        if module is None:
            continue
        if renamed(module) in found:
            raise _unsupported(
                f"{tensor.name} belongs to {module}, which modules_to_save replaces: of it only the weight could be, "
                "and half of a trained module is none; train the adapter without it (a pair for its weight, in "
                "target_parameters, is served)",
                tensor,
            )
        others.setdefault(module, tensor)
    if others and not allow_partial:
        names = list(others)
        raise _unsupported(
            f"adapter_config.json: modules_to_save replaces {named(names)} (first {others[names[0]].name}); only linear"
            " maps, routers, embeddings and lm_head can be. Train the adapter without, or set allow_partial to load "
            "the rest: the model's own weights are used for these modules then, and answers differ from those in "
            "training",
            others[names[0]],
        )


def _saved_part(path: str, config: PeftConfig) -> str | None:
    """The module that modules_to_save names, at a path or above it."""
    end = 0
    while end != -1:
        end = path.find(".", end + 1)
        above = path if end == -1 else path[:end]
        if config.saves(above):
            return above
    return None


def _unsupported(message: str, tensor: TensorEntry) -> AdapterFormatError:
    return AdapterFormatError(
        message,
        reason="UNSUPPORTED_ADAPTER",
        metadata={"config_field": "modules_to_save", "tensor": tensor.name},
    )


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
