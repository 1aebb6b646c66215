"""Texts of a server's rows that must fit into its cache together.

A text that is set back loses its keys. Its tokens are kept here, and those without keys precede
the next request of its row, so that nobody but the shared verifier learns of it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from moaspec.engine.local_verifier import LocalVerifier
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.engine.cache_room import CacheRoom, CacheRow
from moaspec_core.engine.scheduler import Scheduler

IDLE_S = 5.0
"""Seconds after which a row without a request is kept only where nobody needs its room: a device
asks again within a few of them, over slow links too."""


@dataclass
class _Text:
    key: int  # later texts have higher ones
    owner: str  # whose turn it is
    token_ids: list[int] = field(default_factory=list)  # that were verified
    num_held: int = 0  # of these, the first ones that have keys
    since_s: float = 0.0  # what its owner had been served when it got room, or began to wait
    asked_s: float = field(default_factory=time.monotonic)
    has_room: bool = False
    answered: bool = False  # whether a request was answered since it has room
    lost: int = 0  # how often it was set back since the latest answer


class RowRoom:
    """Decides which rows have keys.

    Args:
        limit: bytes that all rows may have now.
        piece: tokens of a text that a pass reads while others wait.
    """

    def __init__(
        self, verifier: LocalVerifier, scheduler: Scheduler, limit: Callable[[], int], piece: int
    ) -> None:
        self._verifier, self._scheduler, self._limit = verifier, scheduler, limit
        self._piece = piece
        self._texts: dict[int, _Text] = {}
        self._num_leased = 0
        self.rows_set_back = 0

    def lease(self, row: int, owner: str) -> None:
        self._num_leased += 1
        self._texts[row] = _Text(self._num_leased, owner)

    def ask(self, row: int) -> None:
        """A request of this row begins to wait."""
        text = self._texts[row]
        text.asked_s = time.monotonic()
        if not text.has_room:
            text.since_s = self._scheduler.served_of(text.owner)

    def close(self, row: int) -> None:
        self._texts.pop(row, None)

    def whole(self, request: VerifyRequest) -> VerifyRequest:
        """The request, preceded by tokens that have no keys."""
        text = self._texts[request.cache_row]
        start = min(text.num_held, request.num_verified)
        again = tuple(text.token_ids[start : request.num_verified])
        return replace(request, num_verified=start, new_tokens=again + request.new_tokens)

    def record(self, request: VerifyRequest, result: VerifyResult, *, answered: bool) -> None:
        """Remember a text after a pass.

        Args:
            answered: whether nothing of the request is left.
        """
        text = self._texts.get(request.cache_row)
        if text is None:  # its session has ended
            return
        accepted = [request.tree.tokens[node] for node in result.accepted]
        end = request.num_verified + len(request.new_tokens) + len(accepted)
        if not request.read_again:
            text.token_ids[request.num_verified :] = [*request.new_tokens, *accepted]
        text.num_held, text.asked_s = end, time.monotonic()
        if answered:
            text.answered, text.lost = True, 0

    def ready(self, waiting: Mapping[int, VerifyRequest]) -> set[int]:
        """Drop keys of rows that must give way; the rows that a pass may take.

        Args:
            waiting: by row, the request that waits.
        """
        rows = {row: self._cache_row(row, waiting.get(row)) for row in self._texts}
        rows = {row: one for row, one in rows.items() if one.needed}
        limit = max(0, self._limit())
        self._drop_idle(rows, waiting, limit)
        room = CacheRoom(limit)
        served = {one.owner: self._scheduler.served_of(one.owner) for one in rows.values()}
        admitted = room.admitted([*rows.values()], served)
        numbers = {one.key: row for row, one in rows.items()}
        for key in admitted:
            self._turn(numbers[key], has_room=True)
        rows = {row: self._cache_row(row, waiting.get(row)) for row in rows}
        for key in room.set_back([*rows.values()], admitted, served):
            self._set_back(numbers[key])
        return {row for row in waiting if self._texts[row].has_room}

    def _cache_row(self, row: int, request: VerifyRequest | None) -> CacheRow:
        text, read = self._texts[row], 0
        needed = self._verifier.cache.held_slots(row)
        if request is not None:
            read = len(request.new_tokens)
            needed = max(needed, request.num_verified + read + len(request.tree.tokens))
        costs = self._scheduler.rounds
        return CacheRow(
            key=text.key,
            owner=text.owner,
            needed=self._bytes(needed),
            waits=request is not None and not text.has_room,
            reads=request is not None and text.has_room and not text.answered,
            lost=text.lost,
            read_s=-(-read // self._piece) * costs.fixed_s + read * costs.token_s(read / 2),
            turn_s=self._scheduler.served_of(text.owner) - text.since_s,
        )

    def _bytes(self, tokens: int) -> int:
        if not tokens:
            return 0
        return self._verifier.cache.row_bytes(tokens) + self._verifier.target.state_bytes

    def _drop_idle(
        self, rows: dict[int, CacheRow], waiting: Mapping[int, VerifyRequest], limit: int
    ) -> None:
        """Drop the keys of texts that nobody asks about, the oldest first, while room is short."""
        before = time.monotonic() - IDLE_S
        idle = [row for row in rows if row not in waiting and self._texts[row].asked_s < before]
        for row in sorted(idle, key=lambda row: self._texts[row].asked_s):
            if sum(one.needed for one in rows.values()) <= limit:
                return
            self._set_back(row)
            del rows[row]

    def _set_back(self, row: int) -> None:
        self._verifier.set_back(row)
        self._texts[row].num_held = 0
        self._texts[row].lost += 1
        self._turn(row, has_room=False)
        self.rows_set_back += 1

    def _turn(self, row: int, *, has_room: bool) -> None:
        text = self._texts[row]
        text.answered = False
        text.has_room, text.since_s = has_room, self._scheduler.served_of(text.owner)
