"""The exceptions of epilora, and the one table that maps them to gRPC status codes.

Every error says what, where, expected, got, and what to do. `reason` is the UPPER_SNAKE
constant of google.rpc.ErrorInfo that programs match on; `metadata` holds the values involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc

ERROR_DOMAIN = "epilora.dev"
_RETRY_MAY_HELP = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED)


class EpiloraError(Exception):
    """Root of all errors that a caller may see.

    Args:
        message: what, where, expected, got, what to do; one or two sentences.
        reason: UPPER_SNAKE constant for programs, e.g. "ADAPTER_NOT_FOUND".
        field: path of the request field at fault, for google.rpc.BadRequest.
        retry_after_seconds: when a retry makes sense, for google.rpc.RetryInfo.
        metadata: values involved, for google.rpc.ErrorInfo.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        field: str = "",
        retry_after_seconds: float | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_seconds = retry_after_seconds
        self.metadata = {key: str(value) for key, value in (metadata or {}).items()}

    @property
    def retry_may_help(self) -> bool:
        """False: the same thing would fail the same way again."""
        return self.code in _RETRY_MAY_HELP


class InvalidArgumentError(EpiloraError):
    """The request, or a file it names, is wrong whatever the state of the service."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class AdapterFormatError(InvalidArgumentError):
    """An adapter's files are broken, or do not fit the model: the source of the request is wrong, if no other field."""

    def __init__(self, message: str, *, reason: str, field: str = "source", **details: Any) -> None:
        super().__init__(message, reason=reason, field=field, **details)


class NotFoundError(EpiloraError):
    """Something named in the request does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class PermissionDeniedError(EpiloraError):
    """A source outside the allowed roots."""

    code = grpc.StatusCode.PERMISSION_DENIED


class FailedPreconditionError(EpiloraError):
    """Right in itself, but not in the present state."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class StalePlacementError(FailedPreconditionError):
    """A slice or message that was made for another placement; its sender makes it anew."""


class ResourceExhaustedError(EpiloraError):
    """A limit: slots, memory, queue, message size."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class AbortedError(EpiloraError):
    """Another change of the same thing is under way."""

    code = grpc.StatusCode.ABORTED


class UnavailableError(EpiloraError):
    """A part of the service is not there now; a retry may succeed."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(EpiloraError):
    """A wait ended before what it waited for."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(EpiloraError):
    """A defect of ours."""


_BY_CODE: dict[grpc.StatusCode, type[EpiloraError]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        PermissionDeniedError,
        FailedPreconditionError,
        ResourceExhaustedError,
        AbortedError,
        UnavailableError,
        DeadlineExceededError,
        InternalError,
    )
}


def error_class_for(code: grpc.StatusCode) -> type[EpiloraError]:
    """The exception for a status code that another epilora process answered with."""
    return _BY_CODE.get(code, InternalError)


@contextmanager
def reading_files(path: Path, error_class: type[EpiloraError], *, reason: str, advice: str = "") -> Iterator[None]:
    """Makes one error of whatever keeps the block from reading files.

    Args:
        path: named where the system does not say which file it was.
        error_class: of the error.
        reason: of the error.
        advice: what the message ends with.
    """
    try:
        yield
    except OSError as error:
        message = f"{error.filename or path} cannot be read: {error.strerror}{advice}"
        raise error_class(message, reason=reason) from error
