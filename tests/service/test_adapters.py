"""Adapters on a real service: answers as their writers recorded them, bad input, nothing left behind."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from epilora.errors import EpiloraError
from epilora.rpc import error_from
from epilora.v1 import adapter_service_pb2, generation_service_pb2, types_pb2
from epilora.wire import decode_tensor
from tests.oracle import Oracle
from tests.service.harness import REPOSITORY, Service

PER_EXPERT = "peft-0.17.1-transformers-4.57.3/qwen3moe-T-all"
FUSED = "peft-0.21.2/qwen3moe-T-both"
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(autouse=True)
def _clean(service: Service) -> Iterator[None]:
    yield
    service.unload_all()


def refused(call: Callable[[], object]) -> EpiloraError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_from(caught.value)  # type: ignore[arg-type]


def prompt_logits(service: Service, tokens: list[int], adapter: str) -> np.ndarray:
    messages = service.generate(tokens, adapter, max_tokens=1, return_prompt_logits=True)
    parts = [decode_tensor(m.prompt_logits, field="x") for m in messages if m.HasField("prompt_logits")]
    return np.concatenate(parts)


@pytest.mark.parametrize("source", [PER_EXPERT, FUSED])
def test_logits_are_those_the_writer_recorded(service: Service, adapters: Path, source: str) -> None:
    expected = load_file(adapters / source / "expected.safetensors")
    tokens = expected["input_ids"][0].tolist()
    base = prompt_logits(service, tokens, "")
    adapter = service.load("a", adapters / source)
    assert adapter.state == types_pb2.ADAPTER_STATE_SERVING
    assert adapter.report.num_tensors_used == adapter.report.num_tensors > 0
    got = prompt_logits(service, tokens, "a")
    assert np.abs(got - expected["logits"][0]).max() < 1e-4
    assert np.abs(got - base).max() > 1e-3
    assert service.unload("a").freed_bytes == adapter.resident_bytes > 0
    assert [rank.adapter_bytes for rank in service.memory()] == [0, 0]


def test_dora_and_whole_routers_give_pefts_logits(service: Service, models: Path, scratch_root: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    oracle = Oracle(models / "qwen3moe-T")
    torch.manual_seed(3)
    options = {"use_dora": True, "modules_to_save": ["mlp.gate"], "target_modules": ["q_proj", "o_proj", "lm_head"]}
    oracle.adapt(peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options), scratch_root / "dora")
    expected, base = oracle.logits(PROMPT).numpy(), prompt_logits(service, PROMPT, "")
    adapter = service.load("dora", scratch_root / "dora")
    assert list(adapter.report.saved_modules) == [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)]
    assert list(adapter.report.warnings) == []
    assert np.abs(prompt_logits(service, PROMPT, "dora") - expected).max() < 1e-4
    assert np.abs(base - expected).max() > 1e-2
    assert np.array_equal(prompt_logits(service, PROMPT, ""), base)
    # The same files, if their config names another model.
    config = json.loads((scratch_root / "dora" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "someone/another-model"
    (scratch_root / "dora" / "adapter_config.json").write_text(json.dumps(config))
    (warning,) = service.load("dora", scratch_root / "dora").report.warnings
    assert "'someone/another-model'" in warning
    service.unload("dora")


def test_mixed_batch_gives_each_request_its_own_answer(service: Service, adapters: Path) -> None:
    service.load("a", adapters / PER_EXPERT)
    service.load("b", adapters / FUSED)
    jobs = [(prompt, name) for name in ("", "a", "b") for prompt in (PROMPT, PROMPT[:2], PROMPT * 5)]
    alone = [service.tokens(prompt, name, max_tokens=24) for prompt, name in jobs]
    together: list[list[int]] = [[] for _ in jobs]

    def run(index: int) -> None:
        prompt, name = jobs[index]
        together[index] = service.tokens(prompt, name, max_tokens=24)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert together == alone
    assert alone[0] != alone[3] != alone[6]
    for name in ("a", "b"):
        service.unload(name)


def broken(adapters: Path, directory: Path, change: Callable[[Path], None], source: str = PER_EXPERT) -> Path:
    copy = directory / "adapter"
    shutil.copytree(adapters / source, copy)
    for path in copy.iterdir():
        path.chmod(0o644)
    change(copy)
    return copy


def drop_one_half(copy: Path) -> None:
    tensors = load_file(copy / "adapter_model.safetensors")
    del tensors[next(name for name in sorted(tensors) if "lora_B" in name)]
    save_file(tensors, copy / "adapter_model.safetensors")


def truncate(copy: Path) -> None:
    path = copy / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def add_expert(copy: Path) -> None:
    tensors = load_file(copy / "adapter_model.safetensors")
    extra = {name.replace("experts.3.", "experts.4."): value for name, value in tensors.items() if "experts.3." in name}
    assert extra
    save_file({**tensors, **extra}, copy / "adapter_model.safetensors")


def widen(copy: Path) -> None:
    """As if trained on a model with a larger hidden size."""
    tensors = load_file(copy / "adapter_model.safetensors")
    wide = {
        name: np.concatenate([value, value], axis=1) if "lora_A" in name else value for name, value in tensors.items()
    }
    save_file(wide, copy / "adapter_model.safetensors")


def garble_config(copy: Path) -> None:
    (copy / "adapter_config.json").write_text("{")


def no_weights(copy: Path) -> None:
    (copy / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    "change, code",
    [
        (drop_one_half, grpc.StatusCode.INVALID_ARGUMENT),
        (truncate, grpc.StatusCode.INVALID_ARGUMENT),
        (add_expert, grpc.StatusCode.INVALID_ARGUMENT),
        (garble_config, grpc.StatusCode.INVALID_ARGUMENT),
        (no_weights, grpc.StatusCode.INVALID_ARGUMENT),
        (widen, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_adapters_are_refused_and_leave_nothing(
    service: Service,
    adapters: Path,
    scratch_root: Path,
    change: Callable[[Path], None],
    code: grpc.StatusCode,
) -> None:
    service.load("good", adapters / FUSED)
    before = service.tokens(PROMPT, "good")
    memory = [rank.adapter_bytes for rank in service.memory()]
    shutil.rmtree(scratch_root / "adapter", ignore_errors=True)
    source = broken(adapters, scratch_root, change)
    error = refused(lambda: service.load("bad", source))
    assert error.code is code
    assert error.reason != error.code.name
    assert service.get("bad").failure.reason == error.reason
    assert service.tokens(PROMPT, "good") == before
    assert [rank.adapter_bytes for rank in service.memory()] == memory
    service.unload("bad")
    service.unload("good")


def test_bad_sources(service: Service, adapters: Path, tmp_path: Path) -> None:
    shutil.copytree(adapters / FUSED, tmp_path / "outside")
    table = [
        ("a", tmp_path / "outside", grpc.StatusCode.PERMISSION_DENIED),
        ("a", adapters / ".." / ".." / ".." / "README.md", grpc.StatusCode.PERMISSION_DENIED),
        ("a", adapters / "none", grpc.StatusCode.NOT_FOUND),
        ("a", REPOSITORY / "examples" / "demo" / "per_expert_adapter", grpc.StatusCode.INVALID_ARGUMENT),
        ("../a", adapters / FUSED, grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for name, source, code in table:
        error = refused(lambda name=name, source=source: service.load(name, source))
        assert error.code is code, (source, error.message)
    response = service.adapters().ListAdapters(adapter_service_pb2.ListAdaptersRequest(), timeout=10)
    for adapter in response.adapters:
        assert adapter.state == types_pb2.ADAPTER_STATE_FAILED
        service.unload(adapter.name)
    unknown = refused(lambda: service.tokens(PROMPT, "none"))
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    assert refused(lambda: service.unload("none")).code is grpc.StatusCode.NOT_FOUND


def test_cancelled_generation_frees_its_place(service: Service) -> None:
    request = generation_service_pb2.GenerateRequest(
        token_ids=generation_service_pb2.TokenIds(ids=PROMPT),
        stop=generation_service_pb2.StopOptions(max_tokens=10_000, ignore_eos=True),
    )
    call = service.generation().Generate(request)
    next(call)
    call.cancel()

    def idle() -> bool:
        from epilora.v1 import cluster_service_pb2

        topology = service.cluster().GetTopology(cluster_service_pb2.GetTopologyRequest(), timeout=10)
        return all(rank.num_running_requests == 0 for rank in topology.groups[0].ranks)

    service.until(idle, "free a cancelled request", 10)


def test_reload_under_traffic_never_mixes_generations(service: Service, adapters: Path) -> None:
    sources = [adapters / PER_EXPERT, adapters / FUSED]
    answers = {}
    for source in sources:
        service.load("ref", source)
        answers[source] = service.tokens(PROMPT, "ref", max_tokens=16)
    service.unload("ref")
    assert answers[sources[0]] != answers[sources[1]]
    source_of = {service.load("a", sources[0]).generation: sources[0]}
    ended, failures = threading.Event(), []

    def traffic() -> None:
        while not ended.is_set():
            messages = service.generate(PROMPT, "a", max_tokens=16)
            generations = {message.adapter_generation for message in messages}
            tokens = [token for message in messages for token in message.token_ids]
            seen.append((generations, tokens))

    seen: list[tuple[set[int], list[int]]] = []

    def guarded() -> None:
        try:
            traffic()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(1, 7):
        adapter = service.load("a", sources[index % 2])
        source_of[adapter.generation] = sources[index % 2]
    ended.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(seen) > 4
    for generations, tokens in seen:
        [generation] = generations
        assert tokens == answers[source_of[generation]]
    service.unload("a")
    service.until(lambda: [rank.adapter_bytes for rank in service.memory()] == [0, 0], "free every generation", 10)


def test_watch_shows_a_load(service: Service, adapters: Path) -> None:
    service.load("a", adapters / FUSED)
    seen = []

    def watch() -> None:
        request = adapter_service_pb2.WatchAdapterRequest(name="a")
        for observation in service.adapters().WatchAdapter(request, timeout=30):
            seen.append(observation.adapter.state)

    watching = threading.Thread(target=watch)
    watching.start()
    service.until(lambda: bool(seen), "tell its watcher", 10)
    service.load("a", adapters / PER_EXPERT)
    service.unload("a")
    watching.join(10)
    assert seen[0] == types_pb2.ADAPTER_STATE_SERVING
    assert types_pb2.ADAPTER_STATE_LOADING in seen
    assert types_pb2.ADAPTER_STATE_DRAINING in seen
    assert seen[-1] == types_pb2.ADAPTER_STATE_UNLOADED


def test_report_is_json_that_says_what_was_found(service: Service, adapters: Path) -> None:
    service.load("a", adapters / FUSED)
    service.load("a", adapters / FUSED)
    adapter = service.get("a")
    config = json.loads((adapters / FUSED / "adapter_config.json").read_text())
    assert adapter.report.min_lora_rank <= config["r"] <= adapter.report.max_lora_rank
    assert adapter.report.producer.startswith("0.21.2")
    service.unload("a")
