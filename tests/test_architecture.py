"""The borders between packages, and generated code that matches its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("loader_service", "compute_worker", "gateway")


def _modules(*packages: str) -> list[Path]:
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not path.is_relative_to(ROOT / "epilora" / "v1")]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import, wherever in the file it stands."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, *(node.module or "").split(".")]).rstrip(".")


def _offending(paths: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for line, name in _imports(path)
        if name.partition(".")[0] in forbidden
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_no_other_service(service: str) -> None:
    paths = _modules(service)
    assert paths
    assert not _offending(paths, set(SERVICES) - {service})


def test_epilora_imports_no_service_and_no_torch() -> None:
    # Loader and gateway import epilora, and must start within a second.
    assert not _offending(_modules("epilora"), {*SERVICES, "torch", "triton", "transformers", "peft"})


@pytest.mark.parametrize("service", ["loader_service", "gateway"])
def test_only_workers_import_torch(service: str) -> None:
    assert not _offending(_modules(service), {"torch", "triton", "peft"})


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    offending = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in _modules("compute_worker/kernels")
        for line, name in _imports(path)
        if name.partition(".")[0] not in allowed and not name.startswith("compute_worker.kernels")
    ]
    assert not offending


def test_importing_the_loader_or_the_gateway_does_not_load_torch() -> None:
    code = "import sys, loader_service.__main__, gateway.__main__; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr or "torch is imported"


def test_generated_code_matches_the_protos() -> None:
    command = [sys.executable, "scripts/protos.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
