"""The model that a command is told of: from its config.json, or by a process that has transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpc

from epilora.errors import InvalidArgumentError, error_class_for
from epilora.families import SIZED_FAMILIES
from epilora.model_spec import ModelDescription, ModelSpec

_SECONDS = 180.0


def read_model(path: Path) -> ModelSpec:
    """The spec of a checkpoint's model.

    Families that config.json alone does not describe take a few seconds: another process builds their module tree.

    Raises:
        EpiloraError: no such model, or one that cannot be served, and why.
    """
    if ModelSpec.model_type_of(path) in SIZED_FAMILIES:
        return ModelSpec.from_directory(path)
    command = [sys.executable, "-m", "compute_worker.model_description", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InvalidArgumentError(f"{path} could not be described: {last}", reason="UNKNOWN_MODEL_FAMILY") from error
    if "error" in answer:
        raise error_class_for(grpc.StatusCode[answer["code"]])(answer["error"], reason=answer["reason"])
    return ModelSpec.from_description(path, ModelDescription.from_json(answer))
