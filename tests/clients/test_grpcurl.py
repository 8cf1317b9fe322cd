"""Every line of the README's grpcurl cookbook, with the real binary against a real service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.harness import REPOSITORY, Service

README_ADDRESS = "localhost:50051"


def cookbook() -> list[str]:
    """The commands of the section, one string per fenced block, in order."""
    readme = (REPOSITORY / "README.md").read_text()
    section = readme.split("## grpcurl cookbook\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


def _contains(*parts: str) -> Callable[[str], bool]:
    return lambda output: all(part in output for part in parts)


# What marks each block, and what its output has to hold. The blocks run in the README's order, each on what the
# ones before it left behind.
EXPECTED: list[tuple[str, Callable[[str], bool]]] = [
    ("localhost:50051 grpc.health.v1.Health/Check", _contains('"status": "SERVING"')),
    ('"service": "epilora.v1.GenerationService"', _contains('"status": "SERVING"')),
    (
        "list",
        _contains(
            "epilora.v1.AdapterService",
            "epilora.v1.GenerationService",
            "epilora.v1.ExpertService",
            "epilora.v1.ClusterService",
            "grpc.health.v1.Health",
        ),
    ),
    ("describe epilora.v1.GenerateRequest", _contains("string adapter_name = 3;", "oneof prompt")),
    (
        "LoadAdapter",
        _contains('"state": "ADAPTER_STATE_SERVING"', '"expert_layout": "per_expert"', '"num_tensors": 198'),
    ),
    ("ListAdapters", _contains('"name": "poet"', '"name": "verse"')),
    ('"text": "Q: Who keeps the lamp?', _contains("FINISH_REASON_STOP", '"num_prompt_tokens": 10')),
    ('"token_ids"', _contains("FINISH_REASON_LENGTH", '"num_generated_tokens": 8')),
    ("GetTopology", _contains('"model_type": "qwen3_moe"', '"ready": true')),
    ("GetPlacement", _contains('"strategy": "linear"', '"placement_id"')),
    ("GetMemory", _contains('"base_expert_bytes"', '"adapter_bytes"', '"name": "verse"')),
    ("WatchAdapter", _contains("ADAPTER_STATE_SERVING", "ADAPTER_STATE_UNLOADED", '"freed_bytes"')),
    ("no-such-adapter", _contains("Code: NotFound", '"reason":"ADAPTER_NOT_FOUND"', '"field":"adapter_name"')),
]


def test_every_block_of_the_cookbook_is_expected_here() -> None:
    blocks = cookbook()
    assert len(blocks) == len(EXPECTED)
    for block, (mark, _) in zip(blocks, EXPECTED, strict=True):
        assert mark in block
        assert README_ADDRESS in block


@pytest.fixture(scope="module")
def outputs(demo_service: Service) -> list[str]:
    """What each block printed, run in order by a shell at the repository's root."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = []
    for block in cookbook():
        done = subprocess.run(
            ["bash", "-c", block.replace(README_ADDRESS, demo_service.address)],
            cwd=REPOSITORY,
            env={**os.environ, "PATH": path},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        printed.append(done.stdout)
    return printed


@pytest.mark.parametrize("index", range(len(EXPECTED)), ids=[mark.rpartition(" ")[2] for mark, _ in EXPECTED])
def test_the_block_does_what_the_readme_says(outputs: list[str], index: int) -> None:
    mark, holds = EXPECTED[index]
    assert holds(outputs[index]), f"{mark}:\n{outputs[index]}"


def test_the_adapters_answer_streams_in_pieces_of_text(outputs: list[str]) -> None:
    pieces = re.findall(r'"text": "([^"]*)"', outputs[6])
    assert len(pieces) > 3
    assert "".join(pieces) == " A quiet hand that winds the light each dusk."
