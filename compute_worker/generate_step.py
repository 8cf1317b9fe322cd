"""One generate step of this rank: chunks of sequences in, their next tokens out."""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from compute_worker.model_runner import ModelRunner, SequenceSpan, StepBatch
from compute_worker.requests import Finish, GenerateOutput, Sequence, put_all
from compute_worker.sampler import Sampler
from compute_worker.scheduler import Chunk, Scheduler
from epilora.errors import EpiloraError, FailedPreconditionError

_LOGITS_MESSAGE_BYTES = 3 << 20
"""Prompt logits in one message, well under the 4 MiB that a gRPC client takes by default."""


class GenerateStep:
    """Runs planned chunks through the model, samples, and sends what came out.

    Args:
        runner: computes the logits.
        scheduler: told of sequences that end.
        slot_of: adapter slot of a generation that a request holds; -1 for 0, the base model.
        defers: what a step yields is sent while the device computes the next one, so that encoding and sending do not
            hold that up; for devices that compute beside this thread. Otherwise at once.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        scheduler: Scheduler,
        slot_of: Callable[[int], int],
        defers: bool = False,
    ) -> None:
        self._defers = defers
        self._unsent: list[tuple[Sequence, GenerateOutput | EpiloraError]] = []
        self._runner = runner
        self._scheduler = scheduler
        self._slot_of = slot_of
        self._sampler = Sampler()

    def run(
        self,
        chunks: list[Chunk],
        num_tokens_per_rank: SequenceOf[int],
        plan_next: Callable[[], SequenceOf[Chunk]] = tuple,
    ) -> None:
        """Computes one step with all other ranks.

        Args:
            chunks: of this rank; may be empty.
            num_tokens_per_rank: tokens of every rank, agreed before.
            plan_next: called once, before the step's tokens are known; the chunks that are promised for the next step.
        """
        # A decode step is launched in no time, so there the device need not wait for the planning. Others may take the
        # host as long as the device.
        decodes = all(chunk.length == 1 for chunk in chunks)
        launches_first = self._defers and decodes and max(num_tokens_per_rank) <= self._runner.max_num_sequences
        promised = () if launches_first else plan_next()
        batch, rows_of = self._batch(chunks) if chunks else (None, {})
        logits_NV = self._runner.forward(batch, num_tokens_per_rank)
        if launches_first:
            promised = plan_next()
        # On a GPU the step has only begun.
        self.send()
        if logits_NV is not None:
            self._sample(chunks, logits_NV, rows_of, {id(chunk.sequence) for chunk in promised})
            if not self._defers:
                self.send()

    def _sample(
        self, chunks: list[Chunk], logits_NV: torch.Tensor, rows_of: dict[int, range], promised: Container[int]
    ) -> None:
        """Gives the sequences their tokens; those that end leave, or, if promised, once their next chunk has run."""
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.start + chunk.length
        finishing = [chunk for chunk in chunks if chunk.completes and not chunk.sequence.ended]
        tokens: list[int | None] = []
        if finishing:
            last_rows = torch.tensor([rows_of[id(chunk)].stop - 1 for chunk in finishing], device=logits_NV.device)
            tokens = self._sampler.sample(logits_NV[last_rows], [chunk.sequence for chunk in finishing])
        token_of = {id(chunk): token for chunk, token in zip(finishing, tokens, strict=True)}
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.ended:
                self._scheduler.finish(sequence)
                continue
            if id(chunk) in token_of and token_of[id(chunk)] is None:
                # One request's bad numbers end that request, not the step of all others.
                self._unsent.append((sequence, _not_finite(sequence)))
                ends = True
            else:
                ends = self._collect(chunk, token_of.get(id(chunk)), logits_NV, rows_of[id(chunk)])
            if ends and id(sequence) in promised:
                sequence.ended = True
            elif ends:
                self._scheduler.finish(sequence)

    def send(self) -> None:
        """Hands over what earlier steps yielded."""
        unsent, self._unsent = self._unsent, []
        for sequence in put_all([(sequence, output) for sequence, output in unsent if not sequence.cancelled]):
            sequence.outputs.put(sequence.slow_reader_error())
            sequence.cancelled = True

    def _batch(self, chunks: list[Chunk]) -> tuple[StepBatch, dict[int, range]]:
        """The packed batch, and which rows of its logits belong to each chunk."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        logits_rows: list[int] = []
        rows_of: dict[int, range] = {}
        for chunk in chunks:
            sequence, first = chunk.sequence, len(token_ids)
            stop = chunk.start + chunk.length
            # Who ended without a token, since the logits were not finite, has none to go on with; any will do.
            token_ids += sequence.token_ids[chunk.start : stop] or [0]
            positions += range(chunk.start, stop)
            slots += [self._slot_of(sequence.request.adapter_generation)] * chunk.length
            spans.append(
                SequenceSpan(
                    query_start=first,
                    query_len=chunk.length,
                    kv_len=stop,
                    block_table=sequence.block_table,
                    place=sequence.place,
                )
            )
            wanted = self._wanted_rows(chunk, first)
            rows_of[id(chunk)] = range(len(logits_rows), len(logits_rows) + len(wanted))
            logits_rows += wanted
        batch = StepBatch(
            token_ids=token_ids, positions=positions, adapter_slots=slots, sequences=spans, logits_rows=logits_rows
        )
        return batch, rows_of

    def _wanted_rows(self, chunk: Chunk, first: int) -> range:
        """Rows of the batch whose logits are needed: the last, and all of the prompt if asked for."""
        if chunk.sequence.ended:
            return range(0)
        if chunk.sequence.request.return_prompt_logits and chunk.start < chunk.sequence.num_prompt:
            return range(first, first + chunk.length)
        return range(first + chunk.length - 1, first + chunk.length) if chunk.completes else range(0)

    def _collect(self, chunk: Chunk, token: int | None, logits_NV: torch.Tensor, rows: range) -> bool:
        """Notes what is to be sent; True if the sequence ends with it."""
        sequence = chunk.sequence
        request = sequence.request
        outputs: list[GenerateOutput] = []
        if request.return_prompt_logits and chunk.start < sequence.num_prompt:
            prompt_NV = _to_numpy(logits_NV[rows.start : rows.stop])
            step = max(1, _LOGITS_MESSAGE_BYTES // prompt_NV[0].nbytes)
            outputs += [
                GenerateOutput(prompt_logits_NV=prompt_NV[start : start + step])
                for start in range(0, len(prompt_NV), step)
            ]
        finish = Finish.NOT_YET
        if token is not None:
            sequence.token_ids.append(token)
            finish = _finish_of(sequence, token)
            logits = _to_numpy(logits_NV[rows.stop - 1 : rows.stop]) if request.return_logits else None
            outputs.append(GenerateOutput(token_ids=(token,), logits_NV=logits, finish=finish))
        self._unsent += [(sequence, output) for output in outputs]
        return finish is not Finish.NOT_YET


def _not_finite(sequence: Sequence) -> FailedPreconditionError:
    request = sequence.request
    who = f"adapter generation {request.adapter_generation}" if request.adapter_generation else "the base model"
    return FailedPreconditionError(
        f"request {request.request_id}: the logits of {who} at position {len(sequence.token_ids)} are not finite: its "
        "weights or scale overflow; check the adapter's lora_alpha and training, or serve in float32",
        reason="LOGITS_NOT_FINITE",
        metadata={"adapter_generation": request.adapter_generation},
    )


def _finish_of(sequence: Sequence, token: int) -> Finish:
    if token in sequence.request.stop_token_ids:
        return Finish.STOP
    return Finish.LENGTH if sequence.num_generated >= sequence.request.max_tokens else Finish.NOT_YET


def _to_numpy(rows_NV: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return rows_NV.to("cpu", torch.float32).numpy()
