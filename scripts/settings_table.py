"""Writes the table of settings into README.md from epilora/settings.py, or checks that it is fresh.

python scripts/settings_table.py            # write
python scripts/settings_table.py --check    # exit 1 if README.md has another table
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- settings: begin (make docs) -->\n", "<!-- settings: end -->\n"


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
    return f"`{value.value}`" if isinstance(value, ast.Constant) and value.value not in ("", None) else "empty"


def rows() -> list[str]:
    """One line per field, grouped by class, from the source: field, default, the string under it."""
    lines = []
    for node in ast.parse((ROOT / "epilora" / "settings.py").read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        lines.append(f"| **{(ast.get_docstring(node) or '').rstrip('.')}** | | |")
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if not (isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)):
                sys.exit(f"{field.target.id} in epilora/settings.py has no string under it that says what it is")
            text = " ".join(str(doc.value.value).split()).replace("|", "\\|")
            lines.append(f"| `EPILORA_{field.target.id.upper()}` | {_default_of(field.value)} | {text} |")
    return lines


def fresh_readme(readme: str) -> str:
    """The README with the table as the settings are now."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "\n".join(["| variable | default | meaning |", "| --- | --- | --- |", *rows()])
    return f"{head}{BEGIN}{table}\n{END}{tail}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    check = parser.parse_args().check
    readme = README.read_text()
    if BEGIN not in readme or END not in readme:
        sys.exit(f"{README} lacks the marks of the settings table")
    fresh = fresh_readme(readme)
    if not check:
        README.write_text(fresh)
    elif fresh != readme:
        sys.exit("the settings table of README.md is stale, run `make docs`")


if __name__ == "__main__":
    main()
