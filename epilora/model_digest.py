"""Identity of a checkpoint, without reading its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epilora.errors import InvalidArgumentError

_MAX_HEADER_BYTES = 512 << 20
# Which program wrote the file, not what the model is.
_NOT_IDENTITY = ("transformers_version", "_name_or_path")


def digest_of_model(path: Path, config: Mapping[str, Any]) -> str:
    """Digest of the config (in canonical form) and of the names, sizes and safetensors headers of the weight files.

    Two checkpoints of equal shapes and different weights have one digest: it guards against
    mixing up models of different structure, and costs a few reads however large the model is.

    Returns:
        64 hex digits.

    Raises:
        InvalidArgumentError: a weight file is too short for its header.
    """
    kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        digest.update(_header_bytes(file))
    return digest.hexdigest()


def _header_bytes(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise InvalidArgumentError(
                f"{file} is not a safetensors file: {size} bytes, header of {length}", reason="BAD_MODEL_WEIGHTS"
            )
        return stream.read(length)
