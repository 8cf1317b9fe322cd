"""`epilora generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from epilora.cli.client import DEFAULT_ADDRESS, Address, Timeout, connected
from epilora.cli.output import error_console, plain
from epilora.v1 import generation_service_pb2, generation_service_pb2_grpc

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def generate(
    text: Annotated[str | None, typer.Argument(help="What to continue.")] = None,
    ids: Annotated[str | None, typer.Option(help='Token ids instead of text, e.g. "1,2,3".')] = None,
    adapter: Annotated[str, typer.Option(help="Adapter to use; none: the base model.")] = "",
    max_tokens: Annotated[int, typer.Option(min=0, max=INT32_MAX, help="Tokens to generate at most; 0: 128.")] = 0,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="0: all tokens.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, max=INT32_MAX, help="0: all tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(min=INT64_MIN, max=INT64_MAX, help="Unset: drawn.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end-of-sequence token.")] = False,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = 300.0,
) -> None:
    """Streams a generation: text to stdout (token ids if the prompt was ids), a summary to stderr."""
    if (text is None) == (ids is None):
        raise typer.BadParameter("give either TEXT or --ids")
    for name, value in [("TEXT", text or ""), ("--adapter", adapter), *(("--stop", value) for value in stop or [])]:
        _check_utf8(name, value)
    request = generation_service_pb2.GenerateRequest(
        adapter_name=adapter,
        sampling=generation_service_pb2.SamplingOptions(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        stop=generation_service_pb2.StopOptions(max_tokens=max_tokens, stop_strings=stop or [], ignore_eos=ignore_eos),
    )
    if text is not None:
        request.text = text
    else:
        request.token_ids.ids.extend(_parse_ids(ids or ""))
    with connected(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        for response in stub.Generate(request, timeout=timeout):
            shown = response.text if text is not None else "".join(f"{token} " for token in response.token_ids)
            typer.echo(shown, nl=False)
            if response.finish_reason:
                _print_summary(response)


def _parse_ids(ids: str) -> list[int]:
    try:
        parsed = [int(part) for part in ids.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"--ids is {ids!r}, expected whole numbers separated by commas") from None
    for token in parsed:
        if not 0 <= token <= INT32_MAX:
            raise typer.BadParameter(f"--ids has {token}, expected token ids of 0 to {INT32_MAX}")
    return parsed


def _check_utf8(name: str, value: str) -> None:
    """Bytes of the command line that are no UTF-8 arrive as lone surrogates, which no message can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{name} is {value!r}, expected UTF-8") from None


def _print_summary(last: generation_service_pb2.GenerateResponse) -> None:
    typer.echo("")
    reason = generation_service_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    generation = f", adapter generation {last.adapter_generation}" if last.adapter_generation else ""
    error_console.print(
        plain(
            f"{last.usage.num_prompt_tokens} + {last.usage.num_generated_tokens} tokens, ended by {reason}, "
            f"rank {last.ep_rank}{generation}",
            "dim",
        )
    )
