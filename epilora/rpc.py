"""gRPC plumbing shared by the services: server, channel, errors as rich status, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from epilora.errors import ERROR_DOMAIN, EpiloraError, InternalError, error_class_for
from epilora.health import HealthServicer
from epilora.request_stream import RequestStream, UnreadableRequest, tolerant

log = structlog.get_logger(__name__)

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
_MAX_STATUS_TEXT = 1500
_MAX_STATUS_VALUE = 300
LAST_REQUESTS_SECONDS = 0.2
"""How long a stream that ends with an error is read on. grpc's asyncio client reports an INTERNAL of its own instead of
the status that arrives while it writes."""

LIVENESS_SERVICE = "liveness"
"""Health name that is SERVING from the first moment a server listens: for liveness probes, which must not end a
process that only waits for others."""

ServerObserver = Callable[[str, str, float], None]
"""Called after each RPC with its full method name, the name of its status code, and its duration in seconds."""


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def make_channel(address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """An insecure aio channel to another epilora process ("unix:/path" or "host:port").

    Reconnects quickly, since a worker group that restarts is back within seconds.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[
            *_options(max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 300),
        ],
    )


def status_of(error: EpiloraError) -> Any:
    """The gRPC status with google.rpc details for an error."""
    message = _fitting(error.message, _MAX_STATUS_TEXT)
    metadata = {key: _fitting(value, _MAX_STATUS_VALUE) for key, value in error.metadata.items()}
    details = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(int(error.retry_after_seconds * 1000))
        details.append(info)
    packed = []
    for detail in details:
        box = any_pb2.Any()
        box.Pack(detail)
        packed.append(box)
    code = code_pb2.Code.Value(error.code.name)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))


def _fitting(text: str, limit: int) -> str:
    """Text that a status can carry: its message and details travel as headers, which are limited to some KiB and
    are UTF-8, while file names and tensor names may be anything."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= limit else f"{clean[:limit]}..."


def error_from(rpc_error: grpc.aio.AioRpcError) -> EpiloraError:
    """The exception that another epilora process raised, rebuilt from its status."""
    reason, field, metadata, retry = rpc_error.code().name, "", {}, None
    status = rpc_status.from_call(rpc_error)
    for box in status.details if status is not None else ():
        if box.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            box.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif box.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            box.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else ""
        elif box.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info_retry = error_details_pb2.RetryInfo()
            box.Unpack(info_retry)
            retry = info_retry.retry_delay.ToMilliseconds() / 1000
    cls = error_class_for(rpc_error.code())
    return cls(
        rpc_error.details() or rpc_error.code().name,
        reason=reason,
        field=field,
        retry_after_seconds=retry,
        metadata=metadata,
    )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of handlers into rich status, in the one place where that is done.

    `EpiloraError` keeps its code and details. Anything else is a defect: the caller gets a
    generic INTERNAL, the log gets the traceback.
    """

    def __init__(self, observer: ServerObserver | None = None) -> None:
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            streaming = handler.stream_stream if handler.request_streaming else handler.unary_stream
            factory = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return factory(
                self._streaming(method, streaming), tolerant(handler.request_deserializer), handler.response_serializer
            )
        single = handler.stream_unary if handler.request_streaming else handler.unary_unary
        factory = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return factory(
            self._single(method, single), tolerant(handler.request_deserializer), handler.response_serializer
        )

    def _single(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            with _Observed(self._observer, method, context) as observed, _Input(request) as given:
                try:
                    return await behavior(given.checked(), context)
                except Exception as error:
                    await given.discard()
                    await observed.abort(error)

        return call

    def _streaming(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with _Observed(self._observer, method, context) as observed, _Input(request) as given:
                try:
                    result = behavior(given.checked(), context)
                    if hasattr(result, "__aiter__"):
                        async for response in result:
                            yield response
                    else:
                        await result
                except Exception as error:
                    await given.discard()
                    await observed.abort(error)

        return call


class _Input:
    """What the caller of one RPC sends: one request or a stream of them."""

    def __init__(self, request: Any) -> None:
        self._request = RequestStream(request) if hasattr(request, "__aiter__") else request

    def __enter__(self) -> _Input:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._request, RequestStream):
            self._request.close()

    def checked(self) -> Any:
        """For the handler. InvalidArgumentError if it is one request that cannot be read."""
        if isinstance(self._request, UnreadableRequest):
            raise self._request.error()
        return self._request

    async def discard(self) -> None:
        """Drops what else the caller sends, for a moment."""
        if isinstance(self._request, RequestStream):
            await self._request.discard(LAST_REQUESTS_SECONDS)


class _Observed:
    """Times one RPC and remembers its status for the observer."""

    def __init__(self, observer: ServerObserver | None, method: str, context: Any) -> None:
        self._observer = observer
        self._method = method
        self._context = context
        self._code = grpc.StatusCode.OK.name

    def __enter__(self) -> _Observed:
        self._start = asyncio.get_running_loop().time()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError or kind is GeneratorExit:
            # grpc cancels the handler alike when its caller has left and when its time is up.
            left = self._context.time_remaining()
            is_late = left is not None and left <= 0
            self._code = (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name
        if self._observer is not None:
            self._observer(self._method, self._code, asyncio.get_running_loop().time() - self._start)

    async def abort(self, error: Exception) -> None:
        if isinstance(error, (grpc.aio.AbortError, grpc.aio.BaseError)) and not isinstance(error, grpc.aio.AioRpcError):
            raise error
        if isinstance(error, grpc.aio.AioRpcError):
            error = error_from(error)
        if not isinstance(error, EpiloraError):
            log.error("unexpected error in a handler", method=self._method, exc_info=error)
            error = InternalError("internal error; the server's log has the details", reason="INTERNAL")
        self._code = error.code.name
        await self._context.abort_with_status(status_of(error))


@dataclass(slots=True)
class Server:
    """A running aio server with its health servicer."""

    server: grpc.aio.Server
    health: HealthServicer
    port: int
    """TCP port bound, 0 for a Unix socket."""

    async def set_serving(self, services: Sequence[str], serving: bool) -> None:
        """Sets the health of services ("" is the whole server)."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in services:
            await self.health.set(service, status)


async def start_server(
    address: str,
    *,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    observer: ServerObserver | None = None,
) -> Server:
    """Starts a server with health (all services NOT_SERVING at first) and reflection.

    Args:
        address: "host:port" (port 0: any free one) or "unix:/path".
        register: adds the servicers.
        service_names: full names, for health and reflection.
        max_message_bytes: limit of one message, either way.
        observer: called after each RPC.

    Raises:
        OSError: the address is in use or cannot be bound.
    """
    # so_reuseport is on by default in grpc: a second server would bind the same port and take half of the calls.
    options = [*_options(max_message_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(interceptors=[ErrorInterceptor(observer)], options=options)
    register(server)
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflected = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(reflected, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    wrapped = Server(server=server, health=servicer, port=0 if address.startswith("unix:") else port)
    await wrapped.set_serving(["", *service_names], False)
    await wrapped.set_serving([LIVENESS_SERVICE], True)
    await server.start()
    return wrapped
