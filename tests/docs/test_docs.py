"""What the documents say is there, is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("clients/*/*.md")])


def _names(path: Path) -> set[str]:
    """Functions, classes and methods of a module, the latter as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def _hops() -> list[tuple[str, str]]:
    """File and function of every hop of the two walks."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", text, flags=re.MULTILINE)


def test_there_are_two_walks() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \| `", text, flags=re.MULTILINE)]
    starts = [index for index, number in enumerate(numbers) if number == 1]
    assert len(starts) == 2
    walks = numbers[: starts[1]], numbers[starts[1] :]
    assert all(walk == list(range(1, len(walk) + 1)) for walk in walks)


@pytest.mark.parametrize("file, function", _hops(), ids=[function for _, function in _hops()])
def test_the_hop_is_a_public_function_of_its_file(file: str, function: str) -> None:
    assert function in _names(ROOT / file)
    assert not any(part.startswith("_") for part in function.split("."))


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_files_named_in_code_type_exist(document: Path) -> None:
    paths = re.findall(
        r"`((?:epilora|gateway|loader_service|compute_worker|scripts|examples)/[\w./-]+)`", document.read_text()
    )
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_tables_of_the_readme_are_fresh() -> None:
    command = [sys.executable, "scripts/readme_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_adr_is_listed() -> None:
    records = {path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    listed = set(re.findall(r"\]\((\d+[^)]*)\)", (ROOT / "docs" / "adr" / "README.md").read_text()))
    assert listed == records


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    listed = set(re.findall(r"^  make ([a-z-]+) ", done.stdout, flags=re.MULTILINE))
    phony = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert listed == phony


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", document.read_text(), flags=re.MULTILINE))
        assert named <= targets


def test_readme_metrics_are_those_of_the_gateway() -> None:
    section = (ROOT / "README.md").read_text().split("## Metrics\n", 1)[1].split("\n## ", 1)[0]
    named = {name.removesuffix("_total") for name in re.findall(r"`(epilora_\w+)`", section)}
    source = (ROOT / "gateway" / "metrics.py").read_text()
    assert not [
        name for name in named if name not in source and name.removeprefix("epilora_loader_cache_") not in source
    ]
