"""Compiles the kernels that send rows for a GPU that need not be there, and prints the order of what they do to memory.

    python -m tests.soak.compiled_rows

One JSON object: for kernels without and with an adapter slot in each row, "load" and "store" in the compiler's order.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from benchmarks.kernel_compile import H200_CAPABILITY, begin

NUM_TOKENS, HIDDEN, TOP_K, NUM_RANKS = 8, 2048, 8, 2


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(num_extras: int) -> None:
    """Packs, unpacks and sends rows."""
    from compute_worker.kernels.one_sided import MAX_PROGRAMS, Areas, Peers, Tiles, send_tokens
    from compute_worker.kernels.token_rows import RowWords, pack_rows, unpack_rows

    width = HIDDEN // 2
    words = RowWords(
        num_x_words=width,
        weight_at=width,
        expert_at=width + TOP_K,
        extra_at=width + 2 * TOP_K,
        num_words=width + 2 * TOP_K + 4 * num_extras,
        top_k=TOP_K,
        num_extras=num_extras,
    )
    tokens: dict[str, torch.Tensor] = {
        "x_TD": meta(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16),
        "weight_TK": meta(NUM_TOKENS, TOP_K, dtype=torch.float32),
        "expert_TK": meta(NUM_TOKENS, TOP_K, dtype=torch.int64),
        "extra_TX": meta(NUM_TOKENS, num_extras),
    }
    pack_rows(meta(NUM_TOKENS, words.num_words), words, **tokens)
    unpack_rows(meta(NUM_RANKS * NUM_TOKENS, words.num_words), words, first=0, end=64)
    send_tokens(
        Peers(rank=0, num_ranks=NUM_RANKS, table_G=meta(NUM_RANKS, dtype=torch.int64), turn_P=meta(MAX_PROGRAMS)),
        Areas(x=4096, slot=1 << 16, weight=1 << 17, extra=1 << 18, part=1 << 19),
        Tiles(),
        **tokens,
        first_G=meta(NUM_RANKS, dtype=torch.int64),
        end_G=meta(NUM_RANKS, dtype=torch.int64),
        num_rows=NUM_TOKENS,
    )


def main() -> None:
    """See the module."""
    begin(H200_CAPABILITY)
    from triton.runtime.jit import JITFunction

    orders: dict[str, dict[str, list[str]]] = {}
    run = JITFunction.run

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        found[self.fn.__name__] = re.findall(r"\btt\.(load|store)\b", kernel.asm["ttir"])
        return kernel

    JITFunction.run = noting
    for num_extras in (0, 1):
        found = orders[str(num_extras)] = {}
        launch(num_extras)
    print(json.dumps(orders))


if __name__ == "__main__":
    main()
