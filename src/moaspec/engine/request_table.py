"""The requests of an engine: active ones, kept ones, and results of ended ones."""

from __future__ import annotations

from moaspec.engine.request_state import RequestState
from moaspec.engine.result import GenerationResult
from moaspec.errors import InputError

MAX_ENDED_RESULTS = 256
"""Ended requests whose results stay available; without a limit they would fill the memory."""


class RequestTable:
    """Requests by handle.

    Attributes:
        active: requests that have not ended.
        kept: ended requests whose cache rows are kept for a later request.
    """

    def __init__(self) -> None:
        self.active: dict[int, RequestState] = {}
        self.kept: dict[int, RequestState] = {}
        self._ended: dict[int, GenerationResult] = {}
        self._next_handle = 0

    def new_handle(self) -> int:
        """A handle that no request had before."""
        self._next_handle += 1
        return self._next_handle - 1

    def free_cache_row(self) -> int:
        """The first cache row that neither an active nor a kept request uses."""
        requests = [*self.active.values(), *self.kept.values()]
        used = {request.cache_row for request in requests}
        return next(i for i in range(len(used) + 1) if i not in used)

    def get_active(self, handle: int) -> RequestState:
        """An active request.

        Raises:
            InputError: it has ended, or no request has this handle.
        """
        if handle not in self.active:
            raise InputError(f"Request {handle} is not active: it has ended, or never joined.")
        return self.active[handle]

    def get_kept(self, handle: int) -> RequestState:
        """An ended request whose cache row is kept.

        Raises:
            InputError: it is not kept.
        """
        if handle not in self.kept:
            raise InputError(
                f"Request {handle} is not kept: add it with keep=True and let it end first."
            )
        return self.kept[handle]

    def end(self, request: RequestState) -> None:
        """Move an active request to the ended ones."""
        del self.active[request.handle]
        self._ended[request.handle] = request.result
        if len(self._ended) > MAX_ENDED_RESULTS:
            del self._ended[next(iter(self._ended))]
        if request.keep:
            self.kept[request.handle] = request

    def forget(self, handle: int) -> RequestState | None:
        """Drop what is held of an ended request.

        Returns:
            The request, if its cache row was kept and can be freed now.

        Raises:
            InputError: nothing is held of it.
        """
        if self._ended.pop(handle, None) is not None and handle not in self.kept:
            return None
        request = self.get_kept(handle)
        del self.kept[handle]
        return request

    def result(self, handle: int) -> GenerationResult:
        """The result of a request, active or ended.

        Raises:
            InputError: no such request, or it ended too many requests ago.
        """
        request = self.active.get(handle) or self.kept.get(handle)
        result = self._ended.get(handle) if request is None else request.result
        if result is None:
            raise InputError(
                f"There is no result of request {handle}: it never joined, was forgotten, or ended "
                f"more than {MAX_ENDED_RESULTS} requests ago. Ask for a result when the request "
                "joins."
            )
        return result
