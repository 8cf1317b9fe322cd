"""Writes the tables of README.md that come from elsewhere, or checks that they are fresh.

    python scripts/readme_tables.py            # write
    python scripts/readme_tables.py --check    # exit 1 if README.md has other tables

`settings`: from epilora/settings.py, each field with its default and the string under it. `measurements`: from the
files of benchmarks/gpu_service.py in benchmarks/results/. `kernels`: from kernels.json there and the reference's file.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernel_report import REFERENCE, reference_us

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def _default_of(value: ast.expr | None) -> str:
    """The default as written, without the Field call around it."""
    if isinstance(value, ast.Call):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in named:
            return "empty"
        if "default" in named:
            return _default_of(named["default"])
        value = value.args[0] if value.args else None
    if value is None:
        return "needed"
    if isinstance(value, ast.BinOp):
        # Sizes are written as shifts: 64 << 20.
        return f"`{eval(compile(ast.Expression(value), 'settings', 'eval'), {'__builtins__': {}})}`"
    return f"`{value.value!s}`" if isinstance(value, ast.Constant) and value.value not in ("", None) else "empty"


def settings() -> Iterator[str]:
    """One line per field, grouped by class."""
    yield "| variable | default | meaning |"
    yield "| --- | --- | --- |"
    for node in ast.parse((ROOT / "epilora" / "settings.py").read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        yield f"| **{(ast.get_docstring(node) or '').rstrip('.')}** | | |"
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if not (isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)):
                sys.exit(f"{field.target.id} in epilora/settings.py has no string under it that says what it is")
            text = " ".join(str(doc.value.value).split()).replace("|", "\\|")
            yield f"| `EPILORA_{field.target.id.upper()}` | {_default_of(field.value)} | {text} |"


def measurements() -> Iterator[str]:
    """One line per measured time, one column per file."""
    files = sorted((ROOT / "benchmarks" / "results").glob("qwen3_30b_*.json"))
    results = [json.loads(file.read_text()) for file in files]
    names = list(dict.fromkeys(name for result in results for name in result["times"]))
    heads = [f"{len(result['hardware'])} x {result['hardware'][0]}, {result['ranks']} ranks" for result in results]
    yield "| | " + " | ".join(head.replace(", 1 ranks", ", 1 rank") for head in heads) + " |"
    yield "| --- |" + " --- |" * len(files)
    for name in names:
        shown = (f"{result['times'][name]:.1f}" if name in result["times"] else "" for result in results)
        yield f"| `{name}` | " + " | ".join(shown) + " |"


def kernels() -> Iterator[str]:
    """One expert layer of three models: without adapters, and with 8 of rank 16 and of rank 64."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())["cells"]
    theirs = json.loads(REFERENCE.read_text())["cells"]
    models = {"a": "Qwen3-30B-A3B", "b": "DeepSeek-V3, 1 of 8 ranks", "c": "Mixtral 8x7B"}
    yield "| layer | tokens | base | 8 adapters, rank 16 | 8 adapters, rank 64 |"
    yield "| --- | --: | --: | --: | --: |"

    def shown(us: float, floor_us: float, reference: float | None) -> str:
        faster = "" if reference is None else f", {reference / us:.2f} x"
        return f"{us:.0f} us, {us / floor_us:.2f}{faster}"

    for shape, model in models.items():
        for tokens in (1, 64, 256, 1024, 4096, 16384):
            wanted = {"shape": shape, "tokens": tokens, "adapters": 8, "half": False}
            found = {c["lora_rank"]: c for c in cells if all(c[key] == value for key, value in wanted.items())}
            row = [shown(found[16]["base_us"], found[16]["floor_base_us"], reference_us(theirs, found[16])[0])]
            for c in (found[16], found[64]):
                row.append(shown(c["lora_us"], c["floor_lora_us"], reference_us(theirs, c)[1]))
            yield f"| {model} | {tokens} | " + " | ".join(row) + " |"


TABLES = {"settings": settings, "measurements": measurements, "kernels": kernels}


def with_fresh_tables(readme: str) -> str:
    """The README with its tables as they should be now."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name}: begin (make docs) -->\n", f"<!-- {name}: end -->\n"
        if begin not in readme or end not in readme:
            sys.exit(f"{README} lacks the marks of the table of {name}")
        head, _, rest = readme.partition(begin)
        readme = head + begin + "\n".join(rows()) + "\n" + end + rest.partition(end)[2]
    return readme


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    check = parser.parse_args().check
    readme = README.read_text()
    fresh = with_fresh_tables(readme)
    if not check:
        README.write_text(fresh)
    elif fresh != readme:
        sys.exit("a table of README.md is stale, run `make docs`")


if __name__ == "__main__":
    main()
