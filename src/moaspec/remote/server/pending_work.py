"""Runs the requests of sessions: one at a time for each session, in shared passes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from moaspec.errors import MoaSpecError
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.server.capabilities import Capabilities
from moaspec.remote.server.response_stream import SessionStreams
from moaspec.remote.server.server_session import DraftRequest, ServerSession, TurnRequest
from moaspec.remote.server.telemetry import Telemetry

log = logging.getLogger(__name__)


class PendingWork:
    """Encodes turns, verifies drafts, and sends the answers.

    Args:
        capabilities: compile grammars and limit the length of texts.
        attachments: send answers.
        observer: metrics and traces.
        remove: called for a session that failed.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        attachments: SessionStreams,
        observer: Telemetry,
        remove: Callable[[ServerSession], None],
    ) -> None:
        self._capabilities, self._attachments = capabilities, attachments
        self._observer, self._remove = observer, remove
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._next: dict[bytes, TurnRequest | DraftRequest] = {}

    def put(self, session: ServerSession, work: TurnRequest | DraftRequest) -> None:
        """Start a session's request; while it is busy, only the latest request is kept."""
        session.used_s = time.monotonic()
        self._next[session.name] = work
        if session.name not in self._tasks:
            self._tasks[session.name] = asyncio.create_task(self._run(session))

    def __contains__(self, session: ServerSession) -> bool:
        """Whether a request of the session is running."""
        return session.name in self._tasks

    def drop(self, session: ServerSession) -> None:
        """Cancel the requests of a session."""
        self._next.pop(session.name, None)
        task = self._tasks.pop(session.name, None)
        if task is not None:
            task.cancel()

    async def settle(self, timeout_s: float) -> None:
        """Wait until no request is running, at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def _run(self, session: ServerSession) -> None:
        """Run the requests of a session until none is left."""
        try:
            while (work := self._next.pop(session.name, None)) is not None:
                await self._do(session, work)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the device is told
            self._fail(session, error)
        finally:
            if self._tasks.get(session.name) is asyncio.current_task():
                del self._tasks[session.name]

    def _do(
        self, session: ServerSession, work: TurnRequest | DraftRequest
    ) -> Coroutine[Any, Any, None]:
        if isinstance(work, TurnRequest):
            return self._begin(session, work)
        return self._verify(session, work)

    async def _begin(self, session: ServerSession, opening: TurnRequest) -> None:
        if opening.turn < session.turn:
            return
        if not session.knows(opening):
            with_grammar = await self._capabilities.with_grammar(
                opening.sampling, opening.grammar, opening.prompt_length, session.owner
            )
            session.begin(opening, with_grammar)
        elif opening.asked is not None:
            session.hold(opening.asked)
        self._attachments.more(session)
        if not session.decided:
            with self._observer.work("prefill"):
                async for _ in session.read():
                    self._attachments.more(session)
        self._attachments.answer(session, len(opening.token_ids))

    async def _verify(self, session: ServerSession, drafted: DraftRequest) -> None:
        committed, most = len(session.token_ids), self._capabilities.max_tokens
        tell = self._attachments
        if drafted.turn != session.turn:
            return
        if drafted.base > committed or not session.decided:
            tell.problem(session, pb.Problem.LOST, "The text here is shorter.")
        elif drafted.base < max(1, committed):
            tell.answer(session, drafted.base)
        elif committed >= most:
            tell.problem(session, pb.Problem.REFUSED, f"Texts end at {most} tokens.")
        else:
            with self._observer.work("verify"):
                activations = await session.verify(drafted.tree)
            self._observer.verified(len(drafted.tree.tokens), len(session.token_ids) - committed)
            tell.answer(session, committed, activations)

    def _fail(self, session: ServerSession, error: Exception) -> None:
        """Tell the device that its session failed, and remove the session."""
        self._observer.failed(type(error).__name__)
        told = str(error)
        if not isinstance(error, MoaSpecError):
            # The message of a library's error might quote the text.
            log.error("A session failed: %s", type(error).__name__)
            told = "The pass failed."
        self._attachments.problem(session, pb.Problem.REFUSED, told)
        self._remove(session)
