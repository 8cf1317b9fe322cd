"""The service on H200s: a random-weight Qwen3-30B-A3B with eight adapters, tokens checked, step times measured.

    python benchmarks/gpu_service.py --ranks 2 --out benchmarks/results/gpu_service_2.json

Starts `epilora serve`, loads two adapters four times each under names of their own, generates mixed batches, stops it,
and compares continuations with `gpu_reference.Reference`. Exit 0 only if the tokens agree: all equal to the
reference's choice, but for near ties.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import qwen3_30b
from benchmarks.command_line import at_least, end_in_order, need_cuda, shared_directory
from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
)

READY_SECONDS = 240
STOP_SECONDS = 90
SOURCES = {"per-expert": "per_expert", "fused": "target_parameters"}
NUM_ADAPTERS = 8
ADAPTERS = [f"{source}-{number}" for number in range(NUM_ADAPTERS // len(SOURCES)) for source in SOURCES]
# A bf16 forward pass of 48 layers is right to a few hundredths of a logit's spread.
NEAR_TIE = 0.15


@dataclass(kw_only=True)
class Answer:
    """One request and what came back."""

    adapter: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class Service:
    """`epilora serve` as a child process.

    Args:
        model: directory of its config.json; the weights are random.
        work: directory of adapters, of the log (serve.log), and of what else the service writes.
        cache: directory of its slices.
        ranks: one GPU each, where there are any.
    """

    def __init__(self, model: Path, work: Path, cache: Path, ranks: int) -> None:
        self._ready_file = work / "ready.json"
        command = [
            *(sys.executable, "-m", "epilora.cli", "serve", "--model", str(model), "--ranks", str(ranks)),
            *("--adapter-root", str(work), "--run-dir", str(work / "run"), "--state-dir", str(work / "state")),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--ready-file", str(self._ready_file)),
            *("--load-format", "random", "--dtype", "bfloat16"),
        ]
        environment = {
            **os.environ,
            "EPILORA_CACHE_DIR": str(cache),
            "EPILORA_MAX_NUM_BATCHED_TOKENS": "16384",
            "EPILORA_MAX_NUM_SEQUENCES": "256",
            "EPILORA_COLLECTIVE_TIMEOUT_SECONDS": "120",
        }
        self.log = (work / "serve.log").open("w")
        self._process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> dict[str, str]:
        """Addresses of the gateway and its metrics."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"serve ended with {self._process.returncode}")
            if self._ready_file.exists():
                addresses: dict[str, str] = json.loads(self._ready_file.read_text())
                return addresses
            time.sleep(0.2)
        raise SystemExit(f"serve was not ready within {READY_SECONDS} s")

    def stop(self) -> None:
        """Ends it and waits."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Its own processes end with it.
            self._process.kill()
            self._process.wait()
        self.log.close()


@contextmanager
def running_service(model: Path, work: Path, ranks: int) -> Iterator[Service]:
    """A service that is stopped at the end, when the end of its log is printed; see Service."""
    with shared_directory() as cache:
        service = Service(model, work, cache, ranks)
        try:
            yield service
        finally:
            service.stop()
            print((work / "serve.log").read_text()[-6000:], file=sys.stderr)


def generate(channel: grpc.Channel, answers: list[Answer], max_tokens: int) -> None:
    """All requests at once; fills in tokens and their times of arrival."""
    stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

    def run(answer: Answer) -> None:
        request = generation_service_pb2.GenerateRequest(
            token_ids=generation_service_pb2.TokenIds(ids=answer.prompt),
            adapter_name=answer.adapter,
            stop=generation_service_pb2.StopOptions(max_tokens=max_tokens, ignore_eos=True),
        )
        for response in stub.Generate(request, timeout=300):
            answer.tokens += response.token_ids
            answer.times += [time.perf_counter()] * len(response.token_ids)

    threads = [threading.Thread(target=run, args=(answer,)) for answer in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make_answers(count: int, prompt_length: int, seed: int, adapters: list[str]) -> list[Answer]:
    """Requests with random prompts of about that length, over the adapters in turn."""
    rng = random.Random(seed)
    return [
        Answer(
            adapter=adapters[i % len(adapters)],
            prompt=[rng.randrange(1000, 150000) for _ in range(max(1, prompt_length - i % 7))],
        )
        for i in range(count)
    ]


def statistics(channel: grpc.Channel) -> tuple[int, cluster_service_pb2.GetMemoryResponse]:
    """Steps done by rank 0, and the memory of all ranks."""
    stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
    topology = stub.GetTopology(cluster_service_pb2.GetTopologyRequest(), timeout=10)
    memory = stub.GetMemory(cluster_service_pb2.GetMemoryRequest(), timeout=10)
    return topology.groups[0].ranks[0].num_steps, memory


def what_ran(metrics: str) -> dict[str, float]:
    """Expert layers by backend and generate steps by form, from the metrics at host:port."""
    # Ranks report once a probe interval.
    time.sleep(1.5)
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    wanted = ("epilora_expert_layers_total", "epilora_generate_steps_total")
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name.startswith(wanted)
    }


def decode_step_ms(answers: list[Answer]) -> float:
    """Median time between tokens, once all requests generate (the second half of each)."""
    gaps = sorted(
        (later - earlier) * 1000
        for answer in answers
        for earlier, later in zip(
            answer.times[len(answer.times) // 2 :], answer.times[len(answer.times) // 2 + 1 :], strict=False
        )
    )
    return gaps[len(gaps) // 2]


def measure(channel: grpc.Channel) -> tuple[dict[str, float], list[Answer]]:
    """Decode at several batch sizes: base alone, base and two adapters, eight adapters; and one long prefill.

    Answers are kept for the check, those of eight adapters in part.
    """
    batches = {"base": [""], "mixed": ["", *ADAPTERS[:2]], "adapters": ADAPTERS}
    times: dict[str, float] = {}
    kept: list[Answer] = []
    generate(channel, make_answers(6, 16, 0, batches["mixed"]), 4)
    for batch in (1, 8, 64):
        for name, adapters in batches.items():
            answers = make_answers(batch, 40, batch, adapters)
            generate(channel, answers, 40)
            times[f"decode_ms_batch_{batch}_{name}"] = decode_step_ms(answers)
            kept += answers if name == "mixed" else answers[:4]
    for name in ("", ADAPTERS[1]):
        answers = make_answers(1, 16384, 99, [name])
        start = time.perf_counter()
        generate(channel, answers, 1)
        times[f"prefill_16384_ms_{name or 'base'}"] = (time.perf_counter() - start) * 1000
    return times, kept


def check(model: Path, work: Path, answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Agreement with the reference, by adapter."""
    from benchmarks.gpu_reference import Reference

    reference = Reference(model)
    result = {}
    for name in ("", *SOURCES):
        if name:
            reference.reset()
            reference.merge(work / name)
        found = [reference.compare(a.prompt, a.tokens) for a in answers if source_of(a.adapter) == name]
        result[name or "base"] = {
            "num_requests": len(found),
            "num_tokens": sum(f.num_tokens for f in found),
            "num_equal": sum(f.num_equal for f in found),
            "worst_gap": max(f.worst_gap for f in found),
            "logit_std": max(f.logit_std for f in found),
        }
    return result


def source_of(adapter: str) -> str:
    """Example: "per-expert-2" -> "per-expert"."""
    return adapter.rpartition("-")[0]


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "grpcio": grpc.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least(1), default=1)
    parser.add_argument("--layers", type=int, default=qwen3_30b.NUM_LAYERS, help="fewer for a trial")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    need_cuda(parser, arguments.ranks)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as folder:
        work = Path(folder)
        model = work / "model"
        qwen3_30b.write_model(model, num_layers=arguments.layers)
        with running_service(model, work, arguments.ranks) as service:
            started = time.perf_counter()
            for seed, (name, layout) in enumerate(SOURCES.items()):
                qwen3_30b.write_adapter(work / name, layout, seed=seed + 1, num_layers=arguments.layers)
            ready = service.wait_ready()
            result: dict[str, object] = {
                "hardware": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
                "versions": versions(),
                "ranks": arguments.ranks,
                "layers": arguments.layers,
                "ready_seconds": time.perf_counter() - started,
            }
            with grpc.insecure_channel(
                ready["address"], options=[("grpc.max_receive_message_length", 64 << 20)]
            ) as channel:
                result["load_seconds"] = load_adapters(channel, work)
                result["times"], answers = measure(channel)
                result["counts"] = what_ran(ready["metrics"])
                _, memory = statistics(channel)
                result["memory"] = [
                    {d.name: v for d, v in rank.ListFields() if isinstance(v, int)} for rank in memory.ranks
                ]
        result["agreement"] = agreement = check(model, work, answers)
        result["answers"] = [asdict(a)["tokens"][:8] for a in answers[:6]]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    wrong = [name for name, a in agreement.items() if a["worst_gap"] > NEAR_TIE * a["logit_std"]]
    if wrong:
        raise SystemExit(f"tokens differ from the reference by more than near ties: {wrong}")


def load_adapters(channel: grpc.Channel, work: Path) -> dict[str, float]:
    """Seconds that LoadAdapter took, by adapter; later loads of a source may find its slices in the cache."""
    stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    seconds = {}
    for name in ADAPTERS:
        start = time.perf_counter()
        request = adapter_service_pb2.LoadAdapterRequest(name=name, source=str(work / source_of(name)))
        stub.LoadAdapter(request, timeout=300)
        seconds[name] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main()
