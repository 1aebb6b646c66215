"""Runs the requests of sessions: one at a time for each session, in shared passes."""

import asyncio
import logging
import time
from collections.abc import Callable

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.errors import MoaSpecError
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.server.capabilities import Capabilities
from moaspec_edge.server.server_session import DraftRequest, ServerSession, TurnRequest
from moaspec_edge.server.telemetry import Telemetry

log = logging.getLogger("moaspec.server.pending_work")


class PendingWork:
    """Encodes turns, verifies drafts, and sends the answers.

    Args:
        capabilities: compile grammars and limit the length of texts.
        remove: called for a session that failed.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        observer: Telemetry,
        remove: Callable[[ServerSession], None],
    ) -> None:
        self._capabilities, self._observer, self._remove = capabilities, observer, remove

    def put(self, session: ServerSession, work: TurnRequest | DraftRequest) -> None:
        """Start a session's request; while it is busy, only the latest request is kept."""
        session.used_s = time.monotonic()
        under_way = session.task is not None and session.waiting is None and session.decided
        if (
            under_way
            and isinstance(work, DraftRequest)
            and work.base == len(session.token_ids)
            and not work.tree.tokens
        ):
            self._aim(session, work)  # the pass under way chooses the token that it asks for
            return
        session.waiting = work
        if session.task is None:
            session.task = asyncio.create_task(self._run(session))

    async def _run(self, session: ServerSession) -> None:
        """Run the requests of a session until none is left, and stream further tokens."""
        try:
            while True:
                work, session.waiting = session.waiting, None
                if isinstance(work, TurnRequest):
                    await self._begin(session, work)
                elif work is not None:
                    await self._verify(session, work)
                elif session.stream is not None and len(session.token_ids) < session.goal:
                    await self._decide(session, DraftTree())
                else:
                    break
        except Exception as error:  # noqa: BLE001 - the device is told
            self._fail(session, error)
        finally:
            session.task = None

    async def _begin(self, session: ServerSession, opening: TurnRequest) -> None:
        session.left = None
        if opening.turn < session.turn:
            return
        if not session.knows(opening):
            with_grammar = await self._capabilities.with_grammar(
                opening.sampling, opening.grammar, opening.prompt_length, session.owner
            )
            session.begin(opening, with_grammar)
        elif opening.asked is not None:
            session.hold(opening.asked.received)
        session.more()
        if not session.decided:
            with self._observer.work("prefill"):
                async for _ in session.read():
                    session.more()
                    if session.stream is None and not session.decided:
                        session.left = opening  # what is read stays
                        return
        session.answer(len(opening.token_ids))

    def go_on(self, session: ServerSession) -> None:
        """Go on with a turn whose reading ended because its device had left: it is back."""
        left, session.left = session.left, None
        if left is not None and session.waiting is None:
            self.put(session, left)

    async def _verify(self, session: ServerSession, drafted: DraftRequest) -> None:
        committed, most = len(session.token_ids), self._capabilities.max_tokens
        if drafted.turn != session.turn:
            return
        if drafted.base > committed or not session.decided:
            session.problem(pb.Problem.LOST, "The text here is shorter.")
            return
        is_new = drafted.base > session.asked
        self._aim(session, drafted)
        if drafted.base < max(1, committed):
            # Tokens that were streamed are under way; only a repeated request gets them again.
            if drafted.tree.tokens or not is_new:
                session.answer(drafted.base)
        elif committed >= most:
            session.problem(pb.Problem.REFUSED, f"Texts end at {most} tokens.")
        else:
            await self._decide(session, drafted.tree)

    def _aim(self, session: ServerSession, drafted: DraftRequest) -> None:
        """Set how far tokens are streamed after the request's own."""
        session.asked = max(session.asked, drafted.base)
        goal = drafted.base + 1 + drafted.num_streamed if drafted.num_streamed else 0
        session.goal = min(goal, self._capabilities.max_tokens)

    async def _decide(self, session: ServerSession, tree: DraftTree) -> None:
        committed = len(session.token_ids)
        with self._observer.work("verify"):
            activations = await session.verify(tree)
        dropped = len(session.dropped)
        self._observer.verified(
            len(tree.tokens) - dropped, dropped, len(session.token_ids) - committed
        )
        late = session.waiting
        if isinstance(late, DraftRequest) and late.base == committed and not tree.tokens:
            session.dropped = list(range(len(late.tree.tokens)))  # they came during the pass
        session.answer(committed, activations)

    def _fail(self, session: ServerSession, error: Exception) -> None:
        """Tell the device that its session failed, and remove the session."""
        self._observer.failed(type(error).__name__)
        told = str(error)
        if not isinstance(error, MoaSpecError):
            # The message of a library's error might quote the text.
            log.error("A session failed: %s", type(error).__name__)
            told = "The pass failed."
        session.problem(pb.Problem.REFUSED, told)
        self._remove(session)
