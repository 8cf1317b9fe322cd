"""Adapters in a repository of the Hugging Face Hub, by huggingface_hub and in its cache: blobs, and links to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from epilora.adapters.weights import choose_weight_names
from epilora.errors import AdapterFormatError, InvalidArgumentError, NotFoundError, PermissionDeniedError
from loader_service.remote import is_commit, quoted_revision
from loader_service.remote_stores import unreachable
from loader_service.source import CONFIG_NAME
from loader_service.writer import BuildProgress

_FIELD = "source"
_URL = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRepository:
    """A directory of a repository at a revision."""

    repo_id: str
    revision: str
    subfolder: str
    endpoint: str | None
    timeout_seconds: float

    @classmethod
    def parse(cls, url: str, *, endpoint: str | None, timeout_seconds: float) -> HubRepository:
        """From hf://org/repo, hf://org/repo@revision or hf://org/repo@revision/directory.

        Raises:
            InvalidArgumentError: reason BAD_SOURCE.
        """
        match = _URL.fullmatch(url)
        if match is None:
            raise InvalidArgumentError(
                f"source {url!r}: expected hf://org/repo@revision, and a directory after a slash where the adapter is "
                "not at the top",
                reason="BAD_SOURCE",
                field=_FIELD,
            )
        repo_id, revision, subfolder = match.groups()
        return cls(
            repo_id=repo_id,
            revision=unquote(revision or "main"),
            subfolder=subfolder or "",
            endpoint=endpoint,
            timeout_seconds=timeout_seconds,
        )

    @property
    def url(self) -> str:
        """As a source."""
        folder = f"/{self.subfolder}" if self.subfolder else ""
        return f"hf://{self.repo_id}@{quoted_revision(self.revision)}{folder}"

    def pinned(self) -> HubRepository:
        """At the commit that the revision names now. A commit needs no look at the Hub.

        Raises:
            NotFoundError, PermissionDeniedError, UnavailableError: as the Hub answers.
        """
        if is_commit(self.revision):
            return self
        return replace(self, revision=str(self._info().sha))

    def fetch(self, cache_dir: Path, progress: BuildProgress) -> Path:
        """The adapter's directory in the cache; files that are there already are not read again.

        Raises:
            AdapterFormatError: NO_ADAPTER_CONFIG, NO_ADAPTER_WEIGHTS.
            NotFoundError, PermissionDeniedError, UnavailableError: as the Hub answers.
            BuildCancelledError: progress was cancelled.
        """
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        held = [file.rfilename for file in self._info().siblings or ()]
        names = sorted(name.removeprefix(prefix) for name in held if name.startswith(prefix))
        if CONFIG_NAME not in names:
            raise AdapterFormatError(f"{self.url} has no {CONFIG_NAME}", reason="NO_ADAPTER_CONFIG", field=_FIELD)
        disable_progress_bars()
        for name in [*choose_weight_names(names, where=self.url), CONFIG_NAME]:
            progress.check()
            with self._errors():
                path = hf_hub_download(
                    self.repo_id,
                    f"{prefix}{name}",
                    revision=self.revision,
                    cache_dir=cache_dir,
                    endpoint=self.endpoint,
                    etag_timeout=self.timeout_seconds,
                )
        return Path(path).parent

    def _info(self) -> Any:
        with self._errors():
            api = HfApi(endpoint=self.endpoint)
            return api.model_info(self.repo_id, revision=self.revision, timeout=self.timeout_seconds)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except GatedRepoError as error:
            raise PermissionDeniedError(
                f"{self.url} is gated: set HF_TOKEN for the loader to one of an account that has access",
                reason="SOURCE_FORBIDDEN",
                field=_FIELD,
            ) from error
        except LocalEntryNotFoundError as error:
            raise unreachable(self.url, error) from error
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
            raise NotFoundError(
                f"{self.url} does not exist, or is private and HF_TOKEN is not set for the loader",
                reason="SOURCE_NOT_FOUND",
                field=_FIELD,
            ) from error
        except HFValidationError as error:
            raise InvalidArgumentError(f"{self.url}: {error}", reason="BAD_SOURCE", field=_FIELD) from error
        except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
            raise unreachable(self.url, error) from error
