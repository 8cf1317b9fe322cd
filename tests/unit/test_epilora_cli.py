"""What the command refuses by itself, before any service is asked or started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from epilora.cli import adapters
from epilora.cli.model import read_model
from epilora.errors import EpiloraError

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*args: str | bytes, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command: Sequence[str | bytes] = [sys.executable, "-m", "epilora.cli", *args]
    kept = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "200", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "args, words",
    [
        (["generate", "a", "--max-tokens", "99999999999"], "--max-tokens"),
        (["generate", "--ids", "1,99999999999"], "99999999999"),
        (["generate", "a", "--seed", "99999999999999999999"], "--seed"),
        (["generate", b"\xff\xfe"], "expected UTF-8"),
    ],
)
def test_wrong_usage_is_one_error(args: list[str | bytes], words: str) -> None:
    failed = run(*args)
    assert failed.returncode == 2, failed.stderr
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("address", ["", " "])
def test_an_empty_address_is_refused(address: str) -> None:
    failed = run("generate", "a", "--address", address)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: INVALID_ARGUMENT (BAD_ADDRESS)\n"), failed.stderr


SERVER_THAT_DIES = """
import os
from concurrent.futures import ThreadPoolExecutor
import grpc
from epilora.v1 import generation_service_pb2, generation_service_pb2_grpc
class Servicer(generation_service_pb2_grpc.GenerationServiceServicer):
    def Generate(self, request, context):
        yield generation_service_pb2.GenerateResponse(text="once upon")
        os.read(0, 1)
        os._exit(1)
server = grpc.server(ThreadPoolExecutor(1))
generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(Servicer(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


def test_a_stream_that_is_cut_was_answered() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER_THAT_DIES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        client = subprocess.Popen(
            [sys.executable, "-m", "epilora.cli", "generate", "a", f"--address={address}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert client.stdout is not None
        assert client.stdout.read(len("once upon")) == "once upon"
        server.stdin.close()
        _, printed = client.communicate(timeout=30)
        assert f"the connection to the gateway at {address} was lost" in printed
        assert client.returncode == 3
    finally:
        server.kill()
        server.wait()


def test_a_model_without_experts_is_a_wrong_argument(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EpiloraError) as refused:
        read_model(tmp_path)
    assert (refused.value.code.name, refused.value.reason) == ("INVALID_ARGUMENT", "UNKNOWN_MODEL_FAMILY")


def test_a_relative_source_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert adapters._absolute("a/b") == str(tmp_path.resolve() / "a" / "b")
    assert adapters._absolute("/a/b") == "/a/b"
    assert adapters._absolute("file:///a/b") == "file:///a/b"


def test_commands_that_look_at_files_do_without_the_others_imports() -> None:
    """They would take longer than the command itself."""
    code = (
        "import sys; sys.argv = ['epilora', 'inspect', '--help']\n"
        "from epilora.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print([n for n in ('grpc_status', 'structlog', 'pydantic_settings') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert "Directory with adapter_config.json" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
