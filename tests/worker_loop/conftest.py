"""One rank of the tiny model, and transformers' own answers for it."""

from __future__ import annotations

import pytest

from compute_worker.ep_group import EPGroup
from compute_worker.model_runner import ModelRunner
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings
from tests.oracle import Oracle
from tests.worker_loop.tiny_rank import MODEL


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    settings = WorkerSettings(model=MODEL, kv_cache_bytes=1 << 20, kv_block_size=4, device="cpu")
    spec = ModelSpec.from_directory(MODEL)
    return ModelRunner(settings, spec, ExpertPlacement.make("linear", spec, 1), EPGroup.from_environment(settings))


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MODEL)
