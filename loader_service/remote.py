"""Adapters that are not on this node's disks: hf://, s3:// and http(s):// sources.

A source is resolved first: to a commit (hf://), or to the state of each of its files. That is its identity, so that a
load of slices that are in the cache downloads nothing; and a repository's commit goes into the adapter's record, so
that a restart loads what was loaded. Files come to a directory on disk and are read from there as any other adapter.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from epilora.adapters.weights import INDEX_NAME, TORCH_NAMES, WEIGHTS_NAME, shard_names
from epilora.errors import AdapterFormatError, InvalidArgumentError, PermissionDeniedError
from epilora.settings import LoaderSettings
from loader_service.downloads import Downloads
from loader_service.remote_stores import FileStore, HttpStore, RemoteFile, S3Store
from loader_service.source import CONFIG_NAME, SourceIdentity
from loader_service.writer import BuildProgress

_FIELD = "source"
_SCHEMES = ("hf", "s3", "http", "https")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_URL_LENGTH = 2048
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteAdapter:
    """A remote source in one state."""

    source: str
    """The source with its revision pinned."""
    files: tuple[RemoteFile, ...]
    """Of s3:// and http(s)://; empty for hf://, where the commit says all."""

    @property
    def identity(self) -> SourceIdentity:
        """Of the state."""
        state = [self.source, [[file.name, file.size_bytes, file.state] for file in self.files]]
        return SourceIdentity(
            weights_stat=(),
            config_digest="",
            header_digest=hashlib.sha256(json.dumps(state).encode()).hexdigest(),
            pinned_source="" if self.files else self.source,
        )


def is_remote(source: str) -> bool:
    """True for a URL of one of the remote schemes."""
    scheme, separator, _ = source.partition("://")
    return bool(separator) and scheme in _SCHEMES


class RemoteSources:
    """The remote places that adapters may be loaded from."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._prefixes = tuple(settings.source_prefixes)
        self._timeout_seconds = settings.source_timeout_seconds
        self._hub_cache = settings.download_dir / "hub"
        self._hub_endpoint = settings.hf_endpoint or None
        self._downloads = Downloads(settings.download_dir / "files", settings.download_bytes)

    def resolve(self, source: str) -> RemoteAdapter:
        """The state a source is in now.

        Raises:
            InvalidArgumentError: not a URL of an adapter.
            PermissionDeniedError: outside EPILORA_SOURCE_PREFIXES, or not ours to read.
            NotFoundError: no such repository or revision.
            UnavailableError: the place does not answer.
        """
        url = self._checked(source)
        if url.startswith("hf://"):
            from loader_service.hub import HubRepository  # huggingface_hub takes a moment to import

            repository = HubRepository.parse(url, endpoint=self._hub_endpoint, timeout_seconds=self._timeout_seconds)
            return RemoteAdapter(source=repository.pinned().url, files=())
        with self._store(url) as store:
            return RemoteAdapter(source=url, files=_wanted_files(url, store))

    @contextmanager
    def fetched(self, adapter: RemoteAdapter, progress: BuildProgress) -> Iterator[Path]:
        """A directory on disk that holds the adapter while the block runs. Raises what `Downloads.fetched` raises."""
        if adapter.source.startswith("hf://"):
            from loader_service.hub import HubRepository

            repository = HubRepository.parse(
                adapter.source, endpoint=self._hub_endpoint, timeout_seconds=self._timeout_seconds
            )
            yield repository.fetch(self._hub_cache, progress)
            return
        with (
            self._store(adapter.source) as store,
            self._downloads.fetched(adapter.identity.digest[:32], store, adapter.files, progress) as directory,
        ):
            yield directory

    @contextmanager
    def _store(self, url: str) -> Iterator[FileStore]:
        store: FileStore
        if url.startswith("s3://"):
            store = S3Store(url, timeout_seconds=self._timeout_seconds)
        else:
            store = HttpStore(url, timeout_seconds=self._timeout_seconds)
        try:
            yield store
        finally:
            store.close()

    def _checked(self, source: str) -> str:
        """The source as it is compared with the prefixes: no tricks with dots, escapes or other hosts."""
        url = source.rstrip("/")
        parts = urlsplit(url)
        path = unquote(parts.path)
        if (
            len(url) > _MAX_URL_LENGTH
            or not url.isprintable()
            or not parts.netloc
            or "\\" in url
            or parts.query
            or parts.fragment
            or (parts.scheme != "hf" and "@" in parts.netloc)
            or {".", "..", ""} & set(path.split("/")[1:])
        ):
            raise InvalidArgumentError(
                f"source {source[:200]!r}: expected hf://org/repo@revision, s3://bucket/path or https://host/path of "
                "an adapter's directory, without query, credentials or dots",
                reason="BAD_SOURCE",
                field=_FIELD,
            )
        if not any(_is_under(url, prefix) for prefix in self._prefixes):
            allowed = ", ".join(self._prefixes) or "none (EPILORA_SOURCE_PREFIXES is empty)"
            raise PermissionDeniedError(
                f"{source} is outside the places that adapters may be loaded from: {allowed}",
                reason="SOURCE_OUTSIDE_ROOTS",
                field=_FIELD,
            )
        return url


def _is_under(url: str, prefix: str) -> bool:
    """True if the prefix ends where a part of the URL does."""
    base = prefix.rstrip("/")
    return url == base or (url.startswith(base) and (url[len(base)] in "/@" or base.endswith(":/")))


def _wanted_files(url: str, store: FileStore) -> tuple[RemoteFile, ...]:
    """The files of an adapter, in the order in which `AdapterWeights` would choose them in a directory."""
    config = store.look(CONFIG_NAME)
    if config is None:
        raise AdapterFormatError(f"{url} has no {CONFIG_NAME}", reason="NO_ADAPTER_CONFIG", field=_FIELD)
    for name in (WEIGHTS_NAME, INDEX_NAME, *TORCH_NAMES):
        weights = store.look(name)
        if weights is None:
            continue
        if name != INDEX_NAME:
            return (config, weights)
        return (config, weights, *_shards(url, store, weights))
    raise AdapterFormatError(
        f"{url} has no {WEIGHTS_NAME}, no {INDEX_NAME} and none of {', '.join(TORCH_NAMES)}",
        reason="NO_ADAPTER_WEIGHTS",
        field=_FIELD,
    )


def _shards(url: str, store: FileStore, index: RemoteFile) -> Sequence[RemoteFile]:
    content = b"".join(store.stream(index, 0)) if index.size_bytes <= _MAX_INDEX_BYTES else b""
    shards: Mapping[str, RemoteFile | None] = {
        name: store.look(name) for name in shard_names(content, where=f"{url}/{INDEX_NAME}")
    }
    missing = [name for name, shard in shards.items() if shard is None]
    if missing:
        raise AdapterFormatError(
            f"{url} has no {missing[0]}, which its index names", reason="NO_ADAPTER_WEIGHTS", field=_FIELD
        )
    return [shard for shard in shards.values() if shard is not None]


def is_commit(revision: str) -> bool:
    """True for a revision that never changes."""
    return bool(_COMMIT.fullmatch(revision))


def quoted_revision(revision: str) -> str:
    """A revision as it stands in a URL: refs/pr/1 becomes refs%2Fpr%2F1."""
    return quote(revision, safe="")
