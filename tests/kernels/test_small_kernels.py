"""Expert ids and the cache's writes against plain torch."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.expert_layer import PhysicalExperts
from compute_worker.expert_load import RowCounter
from compute_worker.kernels.cache_write import write_kv
from compute_worker.kernels.expert_ids import choose_copies, count_rows
from tests.kernels.cases import DEVICE


def _experts(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    expert_TK = torch.randint(-1, 5, (num_tokens, 3), generator=generator)
    return expert_TK.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 100])
def test_copies_are_chosen_as_torch_chooses_them(num_tokens: int, dtype: torch.dtype) -> None:
    copies_EC = torch.tensor([[0, 0], [1, 5], [2, 2], [3, 6], [4, 4]], device=DEVICE)
    num_copies_E = torch.tensor([1, 2, 1, 2, 1], device=DEVICE)
    physical = PhysicalExperts(
        copies_EC=copies_EC, num_copies_E=num_copies_E, rank_offsets=(0, 7), shift=1, uses_kernels=False
    )
    expert_TK = _experts(num_tokens, dtype)
    wanted = physical.choose(expert_TK, None)
    got = choose_copies(expert_TK, copies_EC, num_copies_E, shift=1)
    assert got.dtype == torch.int64
    assert torch.equal(got, wanted)
    if num_tokens == 100:
        assert set(got.flatten().tolist()) == {-1, 0, 1, 2, 3, 4, 5, 6}
        num_rows = torch.tensor([37], device=DEVICE)
        padded = choose_copies(expert_TK, copies_EC, num_copies_E, shift=1, num_rows=num_rows)
        assert torch.equal(padded[:37], wanted[:37])
        assert bool((padded[37:] == -1).all())
        assert torch.equal(physical.choose(expert_TK, num_rows), padded)


def test_rows_are_counted_by_adapter_and_slot() -> None:
    slot_NK, width = _experts(100, torch.int64), 6
    generator = torch.Generator().manual_seed(2)
    adapter_slot_N = torch.randint(-1, 3, (100,), generator=generator, dtype=torch.int32).to(DEVICE)
    start = torch.arange(4 * width, dtype=torch.int64, device=DEVICE)
    counts, wanted = start.clone(), start.clone()
    RowCounter(counts=wanted, width=width, uses_kernels=False).add(slot_NK, adapter_slot_N)
    count_rows(slot_NK, adapter_slot_N, counts, width=width)
    assert torch.equal(counts, wanted)
    assert int(counts.sum() - start.sum()) == slot_NK.numel()
    count_rows(slot_NK[:0], adapter_slot_N[:0], counts, width=width)
    assert torch.equal(counts, wanted)


@pytest.mark.parametrize("widths", [(8, 8), (12, 5)])
def test_keys_and_values_go_to_their_slots(widths: tuple[int, int]) -> None:
    heads, num_tokens, num_slots = 3, 4, 9
    generator = torch.Generator().manual_seed(1)
    # As projections leave them: tokens first, seen as heads first.
    new = [torch.randn((num_tokens, heads, width), generator=generator).to(DEVICE) for width in widths]
    caches = [torch.randn((num_slots, heads, width), generator=generator).to(DEVICE) for width in widths]
    slot_T = torch.tensor([7, 0, 8, 3], device=DEVICE)
    wanted = [cache.index_copy(0, slot_T, part) for cache, part in zip(caches, new, strict=True)]
    write_kv(new[0].transpose(0, 1), new[1].transpose(0, 1), *caches, slot_T)
    assert all(torch.equal(cache, other) for cache, other in zip(caches, wanted, strict=True))
