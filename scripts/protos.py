"""Generates the Python code of protos/ into epilora/v1, or checks that what is committed is what it would generate.

    python scripts/protos.py            # write
    python scripts/protos.py --check    # exit 1 and name the files that differ

Uses grpcio-tools 1.84.0: stubs refuse a grpcio older than the tools that made them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("epilora/v1")


def generate(output: Path) -> None:
    """Runs protoc on every proto, writing under `output`."""
    protos = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos" / PACKAGE).glob("*.proto"))
    arguments = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    include = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"-I{include}", *arguments, *protos])
    if status != 0:
        sys.exit(f"protoc ended with {status}; its messages are above")


def differences() -> list[str]:
    """Names of generated files that are missing, stale or left over in epilora/v1."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh = {path.name: path.read_bytes() for path in (Path(directory) / PACKAGE).iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    if not parser.parse_args().check:
        generate(ROOT)
    elif names := differences():
        sys.exit(f"generated code differs from protos/, run `make protos`: {', '.join(names)}")


if __name__ == "__main__":
    main()
