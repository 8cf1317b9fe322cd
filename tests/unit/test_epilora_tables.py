"""What the commands print in terminals of any width, whatever names hold: nothing is cut off, nothing is markup."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from epilora.cli import adapters
from epilora.model_spec import ModelSpec
from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    types_pb2,
)
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_layouts import tensors_of
from tests.unit.epilora_models import write_model
from tests.unit.test_epilora_cli import run

WIDTHS = (40, 50, 80, 200)
NAME = "n" * 127 + "e"
SOURCE = "/adapters/" + "s" * 120 + "e"
PIDS = (2_064_123, 4_194_304)
BRACKETS = ("b[/red]", "[bold]", ":smile:")


def shown_at(width: int, *args: object, code: int = 0) -> str:
    """All output of a command; no line of it is wider than the terminal, or ends in what stands for a cut."""
    done = run(*map(str, args), environment={"COLUMNS": str(width)})
    assert done.returncode == code, done.stderr
    assert "…" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines()), default=0) <= width
    return done.stdout + done.stderr


def columns_of(shown: str) -> list[str]:
    """The text of each column of the tables, without the spaces and the ends of lines that folding puts into it."""
    columns: list[str] = []
    for line in shown.splitlines():
        for place, cell in enumerate(re.split("[┃│]", line)[1:-1]):
            columns += [""] * (place + 1 - len(columns))
            columns[place] += re.sub(r"\s", "", cell)
    return columns


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    return write_adapter(tmp_path_factory.mktemp("adapter"), tensors, **changes)


def plan_at(width: int, model: Path, adapter: Path, *names: str) -> str:
    given = [part for name in names for part in ("--adapter", f"{name}={adapter}")]
    return shown_at(width, "plan", "--model", model, "--ranks", 2, *given)


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_shows_brackets_in_names(width: int, model: Path, adapter: Path) -> None:
    """A closing bracket without its opening one is an error of rich; an opening one would be gone."""
    columns = columns_of(plan_at(width, model, adapter, *BRACKETS))
    for name in BRACKETS:
        assert any(f"adapter{name}" in column for column in columns)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("names", [[NAME], [f"adapter-with-a-name-of-forty-characters-{i}" for i in range(8)]])
def test_plan_of_long_names(width: int, names: list[str], model: Path, adapter: Path) -> None:
    shown = plan_at(width, model, adapter, *names)
    columns = columns_of(shown)
    for name in names:
        assert any(f"adapter{name}" in column for column in columns)
    # Of each of two ranks: two kinds of weights, the adapters', and the total. None was parted from its unit.
    assert len(re.findall(r"(?<=│) +\d+\.\d KiB +(?=│)", shown)) == 2 * (3 + len(names))


def test_a_plan_that_is_turned_round_has_a_line_for_each_rank_and_adapter(model: Path, adapter: Path) -> None:
    names = [f"adapter-with-a-name-of-forty-characters-{i}" for i in range(8)]
    shown = plan_at(80, model, adapter, *names)
    for name in names:
        assert len(re.findall(rf"│ adapter {name} +│ \d+\.\d KiB +│", shown)) == 2


def test_a_table_that_fits_has_a_line_for_each_rank(model: Path, adapter: Path) -> None:
    shown = plan_at(80, model, adapter, "mine")
    assert re.search(r"│ 0 +│ 0-1 +│ \S+ KiB +│ \S+ KiB +│ \S+ KiB +│ \S+ KiB +│", shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_of_experts_is_as_wide_as_the_terminal(width: int, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_experts=64)
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    shown = shown_at(width, "inspect", write_adapter(tmp_path / "a", tensors, **changes), "--model", model)
    assert len(re.findall(rf"^   [01] \|█{{{min(64, width - 7)}}}\|$", shown, re.MULTILINE)) == 2


class Gateway(
    adapter_service_pb2_grpc.AdapterServiceServicer,
    cluster_service_pb2_grpc.ClusterServiceServicer,
    health_pb2_grpc.HealthServicer,
):
    """Answers as one with two ranks and an adapter whose name is as long as it may be."""

    def __init__(self) -> None:
        self.adapter = types_pb2.Adapter(
            name=NAME,
            source=SOURCE,
            state=types_pb2.ADAPTER_STATE_SERVING,
            generation=123_456,
            adapter_slot=17,
            resident_bytes=1_047_000,
        )

    def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def GetTopology(self, request: Any, context: Any) -> cluster_service_pb2.GetTopologyResponse:  # noqa: N802
        ranks = [
            cluster_service_pb2.RankInfo(ep_rank=ep_rank, ready=True, device="cuda:0", pid=pid, num_steps=98_765_432)
            for ep_rank, pid in enumerate(PIDS)
        ]
        return cluster_service_pb2.GetTopologyResponse(groups=[cluster_service_pb2.Group(ranks=ranks)])

    def GetMemory(self, request: Any, context: Any) -> cluster_service_pb2.GetMemoryResponse:  # noqa: N802
        sizes = {"base_expert_bytes": 1_047_000, "kv_cache_bytes": 1_047_000, "state_cache_bytes": 1_047_000}
        return cluster_service_pb2.GetMemoryResponse(ranks=[cluster_service_pb2.RankMemory(ep_rank=0, **sizes)])

    def ListAdapters(self, request: Any, context: Any) -> adapter_service_pb2.ListAdaptersResponse:  # noqa: N802
        return adapter_service_pb2.ListAdaptersResponse(adapters=[self.adapter])

    def LoadAdapter(self, request: Any, context: Any) -> adapter_service_pb2.LoadAdapterResponse:  # noqa: N802
        return adapter_service_pb2.LoadAdapterResponse(adapter=self.adapter)

    def UnloadAdapter(self, request: Any, context: Any) -> adapter_service_pb2.UnloadAdapterResponse:  # noqa: N802
        return adapter_service_pb2.UnloadAdapterResponse(freed_bytes=1_047_000)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway whose socket has a closing bracket in its name."""
    directory = tmp_path_factory.mktemp("g") / "["
    directory.mkdir()
    gateway, server = Gateway(), grpc.server(ThreadPoolExecutor(4))
    adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(gateway, server)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(gateway, server)
    health_pb2_grpc.add_HealthServicer_to_server(gateway, server)
    address = f"unix:{directory}/red]"
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


@pytest.mark.parametrize("width", WIDTHS)
def test_status_cuts_nothing_off(width: int, address: str) -> None:
    shown = shown_at(width, "status", "--address", address)
    assert f"{address}:SERVING" in re.sub(r"\s", "", shown)
    columns = columns_of(shown)
    for whole in (NAME, SOURCE):
        assert any(whole in column for column in columns)
    for number in (*PIDS, 98_765_432, 123_456, 17, "1022.5 KiB"):
        assert re.search(rf"│ {number} +│", shown), number


@pytest.mark.parametrize("width", WIDTHS)
def test_a_list_of_adapters_cuts_nothing_off(width: int, address: str) -> None:
    shown = shown_at(width, "adapter", "list", "--address", address)
    assert any(NAME in column for column in columns_of(shown))
    assert any(SOURCE in column for column in columns_of(shown))


@pytest.mark.parametrize("name", [NAME, "[/red]", "[bold]"])
def test_a_load_says_what_it_loads(name: str, address: str) -> None:
    shown = shown_at(40, "adapter", "load", name, "/a", "--address", address)
    assert f"loading{name}" in re.sub(r"\s", "", shown)
    assert SOURCE in columns_of(shown)[1]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_of_a_load_keeps_its_numbers(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    progress = adapters._progress()
    progress.add_task("loading", total=456_700_000_000, completed=123_400_000_000)
    with console.capture() as captured:
        console.print(progress.get_renderable())
    (line,) = captured.get().splitlines()
    assert re.fullmatch(r"loading +━+╸? +123\.4/456\.7 GB 0:00:00", line.rstrip()), line


def test_an_unload_says_what_it_unloads(address: str) -> None:
    assert "unloaded [/red]: 1022.5 KiB freed" in shown_at(80, "adapter", "unload", "[/red]", "--address", address)
