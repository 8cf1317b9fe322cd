"""Pages of ListAdapters. A token names the last adapter of its page, so pages stay right while adapters come and go."""

from __future__ import annotations

import base64
import binascii

from epilora.errors import InvalidArgumentError
from epilora.v1 import adapter_service_pb2, types_pb2
from gateway.adapter_table import AdapterTable

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


def list_adapters(
    table: AdapterTable, request: adapter_service_pb2.ListAdaptersRequest
) -> adapter_service_pb2.ListAdaptersResponse:
    """One page, in order of name.

    Raises:
        InvalidArgumentError: a negative page_size, a page_token that no response has had, or a state that is none.
    """
    if request.state not in types_pb2.AdapterState.values():
        known = ", ".join(types_pb2.AdapterState.keys())
        message = f"state is {request.state}, expected one of {known} (0: all)"
        raise InvalidArgumentError(message, reason="BAD_STATE", field="state")
    if request.page_size < 0:
        message = f"page_size is {request.page_size}, expected 0 (the default, {DEFAULT_PAGE_SIZE}) to {MAX_PAGE_SIZE}"
        raise InvalidArgumentError(message, reason="BAD_PAGE_SIZE", field="page_size")
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    after = _decode(request.page_token)
    adapters = []
    for entry in table.entries():
        shown = entry.shown()
        if shown is not None and entry.name > after and request.state in (0, shown.state):
            adapters.append(shown)
    page = adapters[:size]
    more = len(adapters) > size
    return adapter_service_pb2.ListAdaptersResponse(
        adapters=[generation.to_proto() for generation in page],
        next_page_token=_encode(page[-1].name) if more else "",
    )


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(f"v1:{name}".encode()).decode()


def _decode(token: str) -> str:
    if not token:
        return ""
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        text = ""
    if not text.startswith("v1:"):
        raise InvalidArgumentError(
            "page_token is not one that ListAdapters gave, expected next_page_token of the page before, or empty",
            reason="BAD_PAGE_TOKEN",
            field="page_token",
        )
    return text.removeprefix("v1:")
