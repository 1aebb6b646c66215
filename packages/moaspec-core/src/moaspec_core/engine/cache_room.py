"""Which texts keep their keys and values when not all fit.

A text that is set back loses its keys and keeps its tokens; it is read again when there is room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_TURN_S = 1.0
READ_AGAIN = 4
"""An owner that waits for room takes another's when it was served this many seconds less, and this
many times what its text takes to read again. So at most a fifth of the work is reading again."""


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """One text's part of the cache."""

    key: int  # texts that came earlier have lower ones
    owner: str
    priority: int = 0
    held: int  # bytes of memory
    needed: int  # bytes after the next step; of a text that waits, to read all of it
    waits: bool = False  # whether it has no keys and waits for room
    read_s: float = 0.0  # of a text that waits, seconds to read it


class CacheRoom:
    """Shares `limit` bytes among owners."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def admitted(self, rows: Sequence[CacheRow], served: Mapping[str, float]) -> list[int]:
        """Texts that wait and may be read now, those of the least served owners first.

        A text gets free room; room of owners beyond their share, if its own stays within; and
        otherwise another owner's when its turn comes.
        """
        used = Counter({row.owner: 0 for row in rows})
        for row in rows:
            used[row.owner] += 0 if row.waits else row.needed
        share = self.limit // max(1, len(used))
        waiting = [row for row in rows if row.waits]
        waiting.sort(key=lambda row: (served.get(row.owner, 0.0), row.priority, row.key))
        found: list[int] = []
        for row in waiting:
            if (
                not used.total()  # alone it may always go on
                or used.total() + row.needed <= self.limit
                or used[row.owner] + row.needed <= share
                or self._has_its_turn(row, used, served)
            ):
                found.append(row.key)
                used[row.owner] += row.needed
        return found

    def set_back(self, rows: Sequence[CacheRow], admitted: Sequence[int]) -> list[int]:
        """Texts to set back so that the others fit.

        The newest text of the owner that holds most goes first. The last text that is left is never
        set back, nor is one that was just admitted.
        """
        holding = [row for row in rows if not row.waits or row.key in admitted]
        found: list[int] = []
        while sum(row.needed for row in holding) > self.limit and len(holding) > 1:
            used: Counter[str] = Counter()
            for row in holding:
                used[row.owner] += row.needed
            old = [row for row in holding if row.key not in admitted] or holding
            most = max(old, key=lambda row: (used[row.owner], row.priority, row.key))
            holding.remove(most)
            found.append(most.key)
        return found

    def _has_its_turn(self, row: CacheRow, used: Counter[str], served: Mapping[str, float]) -> bool:
        """Whether an owner without room was served much less than another with room."""
        if used[row.owner]:
            return False
        most = max(served.get(owner, 0.0) for owner in used if used[owner] or owner == row.owner)
        turn_s = max(LEAST_TURN_S, READ_AGAIN * row.read_s)
        return most - served.get(row.owner, 0.0) > turn_s
