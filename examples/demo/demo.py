"""The whole path, seen working: train an adapter, serve it beside another, and compare every answer with PEFT's.

    make demo                                  # or: python examples/demo/demo.py [--ranks N] [--dtype bfloat16]

1. PEFT trains the `sailor` adapter on the committed checkpoint (fused experts through `target_parameters`, attention).
2. PEFT and transformers answer the prompts, greedily: the base model and `sailor` here and now; the answers of `poet`,
   which an older PEFT trained in the per-expert layout, were recorded by that PEFT (train_per_expert.py).
3. `epilora serve` spreads the experts over the ranks; both adapters are loaded over gRPC.
4. Every prompt goes to the base model and to both adapters, all at once.
5. Tokens must be equal and logits, at every position of prompt and answer, within 1e-4. Served in bf16, whose rounding
   sends a token to another expert now and then, the tokens must be equal and the logits of the median position within
   3 % of PEFT's fp32 ones by norm. On a GPU every expert layer must have been computed by the fused kernels, and decode
   steps by replayed graphs. Exit status 0 only then.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import torch
from peft import PeftModel
from prometheus_client.parser import text_string_to_metric_families
from prompts import MAX_TOKENS, PROMPTS, Answer, answer_greedily
from rich.console import Console
from rich.table import Table
from running_service import ROOT, NotReadyError, running_service
from safetensors.torch import load_file
from train_adapter import CHECKPOINT, load_base, train_sailor
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from epilora.rpc import make_channel
from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
)
from epilora.wire import decode_tensor

POET = Path(__file__).resolve().parent / "per_expert_adapter"
MAX_DIFFERENCE = 1e-4
MAX_BFLOAT16_ERROR = 0.03
LOAD_SECONDS = 60.0
GENERATE_SECONDS = 120.0
METRICS_SECONDS = 10.0
REPORT_SECONDS = 1.5
BASE = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What the service answered to one prompt."""

    answer: Answer
    text: str
    ep_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One line of the table."""

    adapter_name: str
    served: Served
    expected: Answer
    dtype: str

    @property
    def largest_difference(self) -> float:
        """Largest difference of a logit; infinite if the shapes differ."""
        ours, theirs = self.served.answer.logits_TV, self.expected.logits_TV
        return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")

    @property
    def relative_error(self) -> float:
        """Norm of the difference over that of PEFT's logits, at the median position."""
        ours, theirs = self.served.answer.logits_TV, self.expected.logits_TV
        if ours.shape != theirs.shape:
            return float("inf")
        return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median())

    @property
    def agrees(self) -> bool:
        """Same tokens, same logits up to rounding."""
        if self.served.answer.token_ids != self.expected.token_ids:
            return False
        if self.dtype == "float32":
            return self.largest_difference <= MAX_DIFFERENCE
        return self.relative_error <= MAX_BFLOAT16_ERROR


def answers_of_peft(sailor: Path) -> dict[str, list[Answer]]:
    """Per adapter name, the answer to each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    models = {BASE: load_base(CHECKPOINT), "sailor": PeftModel.from_pretrained(load_base(CHECKPOINT), sailor)}
    answers = {
        name: [answer_greedily(model.eval(), tokenizer.encode(prompt), tokenizer.eos_token_id) for prompt in PROMPTS]
        for name, model in models.items()
    }
    recorded = load_file(POET / "expected.safetensors")
    answers["poet"] = [
        Answer(
            prompt_ids=recorded[f"prompt_ids.{index}"].tolist(),
            token_ids=recorded[f"token_ids.{index}"].tolist(),
            logits_TV=recorded[f"logits.{index}"],
        )
        for index in range(len(PROMPTS))
    ]
    return answers


async def load_adapters(channel: grpc.aio.Channel, sources: dict[str, Path], console: Console) -> None:
    """Loads each adapter and prints what was found in its files."""
    stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    for name, source in sources.items():
        request = adapter_service_pb2.LoadAdapterRequest(name=name, source=str(source))
        adapter = (await stub.LoadAdapter(request, timeout=LOAD_SECONDS)).adapter
        report = adapter.report
        console.print(
            f"  loaded [bold]{name}[/]: slot {adapter.adapter_slot}, {report.expert_layout} experts, "
            f"{report.num_tensors_used} of {report.num_tensors} tensors used, {adapter.resident_bytes} bytes in all"
        )


async def ask(channel: grpc.aio.Channel, prompt: str, prompt_ids: list[int], adapter_name: str) -> Served:
    """One greedy generation, with the logits at every position."""
    request = generation_service_pb2.GenerateRequest(
        text=prompt,
        adapter_name=adapter_name,
        stop=generation_service_pb2.StopOptions(max_tokens=MAX_TOKENS),
        return_logits=True,
        return_prompt_logits=True,
    )
    stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
    token_ids: list[int] = []
    text, ep_rank = "", -1
    prompt_logits: list[np.ndarray] = []
    token_logits: list[np.ndarray] = []
    async for message in stub.Generate(request, timeout=GENERATE_SECONDS):
        token_ids += message.token_ids
        text += message.text
        ep_rank = message.ep_rank
        if message.HasField("prompt_logits"):
            prompt_logits.append(decode_tensor(message.prompt_logits, field="prompt_logits"))
        if message.HasField("logits"):
            token_logits.append(decode_tensor(message.logits, field="logits"))
    # The last position of the prompt chose the first token: its logits come twice.
    logits_TV = np.concatenate([*prompt_logits, np.concatenate(token_logits)[1:]])
    answer = Answer(prompt_ids=prompt_ids, token_ids=token_ids, logits_TV=torch.from_numpy(logits_TV))
    return Served(answer=answer, text=text, ep_rank=ep_rank)


async def compare(
    address: str, sources: dict[str, Path], expected: dict[str, list[Answer]], dtype: str, console: Console
) -> list[Comparison]:
    """Loads the adapters and sends all prompts to all models at once."""
    async with make_channel(address) as channel:
        await load_adapters(channel, sources, console)
        wanted = [(name, index) for index in range(len(PROMPTS)) for name in expected]
        served = await asyncio.gather(
            *(ask(channel, PROMPTS[index], expected[name][index].prompt_ids, name) for name, index in wanted)
        )
    return [
        Comparison(adapter_name=name, served=answer, expected=expected[name][index], dtype=dtype)
        for (name, index), answer in zip(wanted, served, strict=True)
    ]


def print_table(comparisons: list[Comparison], console: Console) -> None:
    """One line per request."""
    table = Table(title="epilora against PEFT, one batch", title_justify="left")
    for heading in (
        "adapter",
        "ep_rank",
        "in",
        "out",
        "largest difference",
        "median relative error",
        "answer",
        "agrees",
    ):
        table.add_column(heading, justify="right" if heading in {"ep_rank", "in", "out"} else "left")
    for comparison in comparisons:
        answer = comparison.served.answer
        table.add_row(
            comparison.adapter_name or "(base)",
            str(comparison.served.ep_rank),
            str(len(answer.prompt_ids)),
            str(len(answer.token_ids)),
            f"{comparison.largest_difference:.1e}",
            f"{comparison.relative_error:.1e}",
            comparison.served.text.strip().replace("\n", " / "),
            "[green]yes[/]" if comparison.agrees else "[bold red]NO[/]",
        )
    console.print(table)


def what_computed(metrics: str) -> tuple[Counter[str], Counter[str]]:
    """Expert layers by backend, and generate steps by form, of all ranks, from the metrics at host:port."""
    counts: dict[str, Counter[str]] = {"epilora_expert_layers": Counter(), "epilora_generate_steps": Counter()}
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=METRICS_SECONDS) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        if family.name in counts:
            for sample in family.samples:
                kind = sample.labels.get("backend") or sample.labels["form"]
                counts[family.name][kind] += int(sample.value)
    return counts["epilora_expert_layers"], counts["epilora_generate_steps"]


def missing_kernels(layers: Counter[str], steps: Counter[str]) -> str:
    """What of a GPU's fast paths was not used; empty if nothing."""
    reference = {backend: count for backend, count in layers.items() if backend != "triton" and count}
    if reference or not layers["triton"]:
        return f"expert layers were computed by {reference or 'nothing'}, expected the fused kernels alone"
    return "" if steps["graph"] else f"no decode step was a replayed graph; steps by form: {dict(steps)}"


def default_num_ranks() -> int:
    """2, or as many as there are GPUs if that is fewer."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def main() -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=default_num_ranks(), help="ranks (default: 2; 1 on a single GPU)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the served weights")
    arguments = parser.parse_args()
    if arguments.ranks < 1:
        parser.error(f"argument --ranks: {arguments.ranks} is too few, expected at least 1")
    try:
        return run(arguments.ranks, arguments.dtype)
    except NotReadyError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1


def run(num_ranks: int, dtype: str) -> int:
    """Runs the demo; the exit status.

    Raises:
        NotReadyError: the service did not come up.
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    (ROOT / ".demo").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=ROOT / ".demo"))
    sources = {"sailor": directory / "sailor", "poet": POET}

    console.print("[bold]1[/] PEFT trains the adapter sailor")
    console.print(f"  loss {train_sailor(CHECKPOINT, sources['sailor']):.3f}")
    console.print(f"[bold]2[/] PEFT answers {len(PROMPTS)} prompts: base model, sailor, poet (recorded)")
    expected = answers_of_peft(sources["sailor"])
    console.print(f"[bold]3[/] epilora serve, {num_ranks} ranks, {dtype}")
    roots = [directory, POET.parent]
    with running_service(
        model=CHECKPOINT, num_ranks=num_ranks, dtype=dtype, adapter_roots=roots, directory=directory
    ) as service:
        console.print(f"  listening on {service.address}, metrics on http://{service.metrics}/metrics")
        comparisons = asyncio.run(compare(service.address, sources, expected, dtype, console))
        # Ranks report once a probe interval.
        time.sleep(REPORT_SECONDS)
        layers, steps = what_computed(service.metrics)
    console.print(f"[bold]4[/] {len(comparisons)} requests at once")
    print_table(comparisons, console)
    console.print(f"expert layers by backend {dict(layers)}, generate steps by form {dict(steps)}")

    missing = missing_kernels(layers, steps) if torch.cuda.is_available() else ""
    if missing:
        console.print(f"[bold red]{missing}[/]; see {directory}")
        return 1
    num_wrong = sum(not comparison.agrees for comparison in comparisons)
    if num_wrong:
        console.print(f"[bold red]{num_wrong} of {len(comparisons)} answers differ from PEFT's[/]; see {directory}")
        return 1
    shutil.rmtree(directory)
    console.print(f"[bold green]all {len(comparisons)} answers agree with PEFT[/]")
    return 0


if __name__ == "__main__":
    disable_progress_bar()
    sys.exit(main())
