"""What a converted adapter calls modules: paths that the tools for its layout read, and how its config names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epilora.adapters.module_paths import is_in_multimodal
from epilora.adapters.normal_form import NormalForm
from epilora.families import ModelFamily, PerExpertForm
from epilora.model_spec import ModelSpec

_TEXT_PATH = "model.language_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputNames:
    """The paths of one conversion."""

    text_path: str
    """Path of the text model in a multimodal one; empty if it stands by itself."""
    form: PerExpertForm | None
    """Names of a checkpoint with single experts; None: those of today's module tree."""
    blocks: tuple[str, ...]
    """Paths of the modules that hold experts, each with a dot."""

    @classmethod
    def make(cls, model: ModelSpec, family: ModelFamily, form: NormalForm, *, single_experts: bool) -> OutputNames:
        """The names for an adapter of a model; inside a multimodal model if its own names are."""
        is_inside = any(is_in_multimodal(pair.a.tensor.name) for pair in form.samples())
        return cls(
            text_path=family.text_path or (_TEXT_PATH if is_inside else ""),
            form=family.per_expert_form if single_experts else None,
            blocks=tuple(f"{block_of(moe.module)}." for moe in model.moe_layers),
        )

    def path(self, module: str) -> str:
        """A module's path in what is written."""
        root, _, rest = module.partition(".")
        if self.form is not None:
            today, theirs = self.form.block
            if today and module.startswith(self.blocks):
                rest = f".{rest}.".replace(f".{today}.", f".{theirs}.", 1)[1:-1]
            if self.form.root and rest:
                root = self.form.root
        if self.text_path and rest:
            return f"{self.text_path}.{rest}"
        return f"{root}.{rest}" if rest else root


def block_of(experts: str) -> str:
    """The module that holds the experts' module."""
    return experts.rpartition(".")[0]


@dataclass(kw_only=True, slots=True)
class OutputTargets:
    """What the config of a converted adapter names."""

    modules: set[str] = field(default_factory=set)
    """Last names of adapted modules."""
    parameters: dict[str, dict[int, str]] = field(default_factory=dict)
    """Path of a parameter in its decoder layer -> layer -> its whole path."""

    def add_parameter(self, layer: int, path: str) -> None:
        """One parameter that has a pair."""
        below = ".".join(path.split(".layers.", 1)[-1].split(".")[1:])
        self.parameters.setdefault(below, {})[layer] = path

    def target_parameters(self, all_layers: frozenset[int]) -> list[str]:
        """Ends of paths that fit all layers with experts; whole paths of a parameter that only some have a pair for.

        PEFT wraps every parameter that a name fits, and the wrappers' order would not be that of the file.
        """
        names: list[str] = []
        for below, by_layer in self.parameters.items():
            names += [below] if all_layers <= by_layer.keys() else by_layer.values()
        return sorted(names)

    def target_modules(self, text_path: str) -> list[str] | str:
        """Last names; in a multimodal model an expression, since its other parts have modules of the same names."""
        if not text_path or not self.modules:
            return sorted(self.modules)
        inside = "|".join(sorted(self.modules - {"lm_head"}))
        choices = [rf".*\.language_model\.(.*\.)?({inside})"] if inside else []
        return "|".join([*choices, *sorted(self.modules & {"lm_head"})])


def patterns(targets: Mapping[str, tuple[int, float]]) -> Mapping[str, tuple[int, float]]:
    """rank and alpha by pattern: the last name of modules that agree, else each module's whole path."""
    by_leaf: dict[str, set[tuple[int, float]]] = {}
    for name, own in targets.items():
        by_leaf.setdefault(name.rpartition(".")[2], set()).add(own)
    found = {}
    for name, own in targets.items():
        leaf = name.rpartition(".")[2]
        found[leaf if len(by_leaf[leaf]) == 1 else f"^{name}"] = own
    return found
