"""An adapter's directory read without a service: for the commands that look at files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from epilora.adapters.keys import PairedTensors
from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.normal_form import AdapterTarget, NormalForm
from epilora.adapters.peft_config import MAX_CONFIG_BYTES, PeftConfig, parse_peft_config
from epilora.adapters.resolve import resolve_adapter
from epilora.adapters.safetensors_header import SafetensorsHeader
from epilora.adapters.weights import AdapterWeights
from epilora.errors import AdapterFormatError, NotFoundError, reading_files
from epilora.families import family_of
from epilora.model_spec import ModelSpec

CONFIG_NAME = "adapter_config.json"
_MAX_HEADER_BYTES = 256 << 20
_MAX_LORA_RANK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAdapter:
    """An adapter's files, their headers read."""

    path: Path
    config_bytes: bytes
    weights: AdapterWeights
    header: SafetensorsHeader

    def config(self) -> PeftConfig:
        """adapter_config.json. Raises as parse_peft_config."""
        return parse_peft_config(self.config_bytes)

    def resolve(
        self,
        model: ModelSpec,
        *,
        allow_partial: bool = False,
        hints: LayoutHints = NO_HINTS,
        paired: PairedTensors | None = None,
    ) -> NormalForm:
        """What every tensor is for in a model; see resolve_adapter for the arguments and errors."""
        target = AdapterTarget.make(
            family_of(model.model_type, model.moe_layers[0].gate_up_layout), model.moe_layers, model.dense_modules
        )
        return resolve_adapter(
            self.header,
            self.config(),
            target,
            max_lora_rank=_MAX_LORA_RANK,
            allow_partial=allow_partial,
            hints=hints,
            paired=paired,
        )


def reading(path: Path) -> AbstractContextManager[None]:
    """`reading_files` of an adapter: AdapterFormatError, reason SOURCE_UNREADABLE."""
    return reading_files(path, AdapterFormatError, reason="SOURCE_UNREADABLE")


@contextmanager
def open_adapter(path: Path) -> Iterator[OpenAdapter]:
    """Opens a directory and reads the headers in it.

    Raises:
        NotFoundError: no such directory.
        AdapterFormatError: no adapter_config.json, or files that cannot be read.
    """
    # Path.is_dir raises for a name that is too long, and for directories on the way that are closed to us.
    if not os.path.isdir(path):
        raise NotFoundError(f"adapter directory {path} does not exist, or cannot be read", reason="SOURCE_NOT_FOUND")
    config = path / CONFIG_NAME
    if not os.path.isfile(config):
        raise AdapterFormatError(f"{path} has no {CONFIG_NAME}", reason="NO_ADAPTER_CONFIG")
    with reading(config), config.open("rb") as stream:
        content = stream.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterFormatError(f"{config} has more than {MAX_CONFIG_BYTES} bytes", reason="BAD_ADAPTER_CONFIG")
    with reading(path):
        weights = AdapterWeights.open(path, _open_file, max_header_bytes=_MAX_HEADER_BYTES)
    with weights:
        yield OpenAdapter(path=path, config_bytes=content, weights=weights, header=weights.tensors())


def _open_file(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdapterFormatError(f"{path} cannot be opened: {error.strerror}", reason="SOURCE_UNREADABLE") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AdapterFormatError(
            f"{path} is no regular file, but a directory, a pipe or the like", reason="SOURCE_UNREADABLE"
        )
    return fd
