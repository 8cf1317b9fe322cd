"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

import torch

from compute_worker.requests import Sequence


class Sampler:
    """Greedy for temperature 0; otherwise temperature, then top-k, then top-p, as Hugging Face orders them.

    Every sequence has a random stream of its own, from its seed and the position of the token: what
    else is in the batch, or a restart, does not change it.
    """

    def sample(self, logits_NV: torch.Tensor, sequences: list[Sequence]) -> list[int | None]:
        """The next token of each sequence.

        Args:
            logits_NV: fp32 [N, vocabulary], row n for sequences[n].
            sequences: N sequences.

        Returns:
            N token ids, None where the logits are not finite numbers. One transfer from the device for all greedy rows
            together.
        """
        # The largest is no finite number if any is infinite upwards or none.
        best = logits_NV.max(dim=-1)
        packed: list[list[int]] = torch.stack([best.indices, best.values.isfinite().long()], dim=1).tolist()
        tokens = [token if finite else None for token, finite in packed]
        for row, sequence in enumerate(sequences):
            if tokens[row] is not None and sequence.request.sampling.temperature > 0:
                tokens[row] = self._draw(logits_NV[row], sequence)
        return tokens

    def _draw(self, logits_V: torch.Tensor, sequence: Sequence) -> int:
        options = sequence.request.sampling
        # Relative to the largest: however small the temperature, nothing overflows.
        logits_V = logits_V.to("cpu", torch.float32)
        scaled_V = (logits_V - logits_V.max()) / options.temperature
        if 0 < options.top_k < scaled_V.numel():
            kth = torch.topk(scaled_V, options.top_k).values[-1]
            scaled_V = scaled_V.masked_fill(scaled_V < kth, float("-inf"))
        if 0 < options.top_p < 1:
            sorted_V, order_V = scaled_V.sort(descending=True)
            probability_V = sorted_V.softmax(dim=-1)
            # A token stays while the probability ahead of it is below top_p: the first one always stays.
            dropped_V = probability_V.cumsum(dim=-1) - probability_V >= options.top_p
            scaled_V = scaled_V.masked_fill(dropped_V.gather(0, order_V.argsort()), float("-inf"))
        generator = torch.Generator().manual_seed(_mix(options.seed, len(sequence.token_ids)))
        return int(torch.multinomial(scaled_V.softmax(dim=-1), 1, generator=generator))


def _mix(seed: int, position: int) -> int:
    """A 63-bit seed from a request's seed and a position (the splitmix64 finaliser)."""
    mask = (1 << 64) - 1
    z = (seed + position * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
