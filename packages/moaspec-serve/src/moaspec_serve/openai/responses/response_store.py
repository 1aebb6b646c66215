"""The latest responses of each tenant, so that later requests can continue them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moaspec_core.support import limits
from moaspec_serve.http_errors import RequestError
from moaspec_serve.sources.source import entry_to_evict

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation as JSON, which takes less memory than Python objects."""

    tenant: str
    id: str
    response: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation)

    @property
    def messages(self) -> Messages:
        messages: Messages = json.loads(self.conversation)
        return messages


class ResponseStore:
    """The latest responses, up to a number and a total size. Tenants see only their own."""

    def __init__(
        self,
        max_responses: int = limits.MAX_STORED_RESPONSES,
        max_bytes: int = limits.MAX_STORED_BYTES,
    ) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: dict[tuple[str, str], StoredResponse] = {}

    def add(self, tenant: str, response: dict[str, Any], messages: Messages) -> None:
        """Store a response. Beyond the limits, evict the oldest of the largest tenant."""
        content = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
        stored = StoredResponse(tenant, response["id"], content, json.dumps(messages).encode())
        self._stored[tenant, stored.id] = stored
        if len(self._stored) > self._max_responses:
            self._evict(lambda _: 1)
        while sum(each.size for each in self._stored.values()) > self._max_bytes:
            self._evict(lambda each: each.size)

    def _evict(self, size: Callable[[StoredResponse], int]) -> None:
        evicted = entry_to_evict(list(self._stored.values()), lambda each: each.tenant, size)
        del self._stored[evicted.tenant, evicted.id]

    def find(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Find a response, or raise `RequestError`."""
        if (tenant, response_id) not in self._stored:
            raise RequestError(
                "There is no response of this id; the latest few are kept.",
                param=param,
                code="not_found",
                status=404,
            )
        return self._stored[tenant, response_id]

    def remove(self, tenant: str, response_id: str) -> None:
        self.find(tenant, response_id)
        del self._stored[tenant, response_id]
