"""Reading back what is in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog
import xxhash

from loader_service.cache import SliceCache

log = structlog.get_logger(__name__)

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What a verification found."""

    num_slices: int
    num_bytes: int
    damaged_paths: tuple[str, ...]


def verify_cache(cache: SliceCache) -> Verified:
    """Digests every slice anew; entries with one that differs, or is missing, are dropped."""
    is_whole: dict[str, bool] = {}
    damaged: set[str] = set()
    num_bytes = 0
    for entry_id, built in cache.built():
        for piece in built.slices:
            if piece.path not in is_whole:
                is_whole[piece.path] = _digest(Path(piece.path)) == piece.digest
                num_bytes += piece.size_bytes
        wrong = {piece.path for piece in built.slices if not is_whole[piece.path]}
        # An entry that is not there any more was given back meanwhile, and its files went with it.
        if wrong and cache.drop(entry_id, built):
            log.error("dropped an entry with damaged slices", entry=entry_id, paths=sorted(wrong))
            damaged |= wrong
    return Verified(num_slices=len(is_whole), num_bytes=num_bytes, damaged_paths=tuple(sorted(damaged)))


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()
