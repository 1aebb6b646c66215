"""Which texts keep their keys and values when not all fit.

A text that is set back loses its keys and keeps its tokens; it is read again when there is room.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

LEAST_TURN_S = 1.0
READ_AGAIN = 4
"""An owner that waits for room takes another's when it was served this many seconds less, and this
many times what its text takes to read again. That bounds what turns of owners read again, and not
what owners within their share take from one another."""

MAX_LOST = 2


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """One text's part of the cache."""

    key: int  # texts that came earlier have lower ones
    owner: str
    priority: int = 0
    needed: int  # bytes after the next step; of a text that is being read, to read all of it
    waits: bool = False  # whether it has no keys and waits for room
    reads: bool = False  # whether it has room and is not read to its end
    # How often it was set back since it last wrote. From `MAX_LOST` on it is read to its end first.
    lost: int = 0
    read_s: float = 0.0  # of a text that waits, seconds to read it
    # Seconds of work that its owner was served since the text got its room, or since it waits.
    # None where texts end by themselves, so that those of one owner need no turns.
    turn_s: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether it gives way to nobody now, so that texts write before they lose room again."""
        return self.reads and self.lost >= MAX_LOST


class CacheRoom:
    """Shares `limit` bytes among owners."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def admitted(self, rows: Sequence[CacheRow], served: Mapping[str, float]) -> list[int]:
        """Texts that wait and may be read now, those of the least served owners first.

        A text gets free room; room of owners beyond their share, if its own stays within; and
        otherwise the room of texts that had their turn when its own comes.
        """
        holding = [row for row in rows if not row.waits]
        used = Counter({row.owner: 0 for row in rows})
        for row in holding:
            used[row.owner] += row.needed
        share = self.limit // max(1, len(used))
        turns, found = _Turns(rows, served), list[int]()
        waiting = [row for row in rows if row.waits]
        waiting.sort(key=lambda row: (turns.begin_s(row), row.priority, row.key))
        for row in waiting:
            stay = {row.key, *found, *(one.key for one in holding if one.is_kept)}
            leaving = self._leaving([*holding, row], stay, served)
            if leaving is None or (
                used[row.owner] + row.needed > share
                and not all(turns.gives_way(one, row) for one in leaving)
            ):
                continue
            found.append(row.key)
            holding = [one for one in [*holding, row] if one not in leaving]
            used[row.owner] += row.needed
            for one in leaving:
                used[one.owner] -= one.needed
        return found

    def set_back(
        self,
        rows: Sequence[CacheRow],
        admitted: Sequence[int],
        served: Mapping[str, float] | None = None,
    ) -> list[int]:
        """Texts to set back so that the others fit.

        Of the owner with most bytes, the text with room for longest goes first; where turns are not
        counted, the newest one. The last text is never set back, nor an admitted one while there is
        another.
        """
        holding = [row for row in rows if not row.waits or row.key in admitted]
        stay = {row.key for row in holding if row.key in admitted or row.is_kept}
        leaving = self._leaving(holding, stay, served or {})
        if leaving is None:
            leaving = self._leaving(holding, (), served or {}) or []
        return [row.key for row in leaving]

    def _leaving(
        self, holding: Sequence[CacheRow], stay: Collection[int], served: Mapping[str, float]
    ) -> list[CacheRow] | None:
        """Rows that leave so that the others fit; None if the rows in `stay` are too many."""
        used: Counter[str] = Counter()
        for row in holding:
            used[row.owner] += row.needed
        left, found = used.total(), list[CacheRow]()
        old = [row for row in holding if row.key not in stay]
        while left > self.limit and len(found) < len(holding) - 1:
            if not old:
                return None
            most = max(
                old,
                key=lambda row: (
                    used[row.owner],
                    row.priority,
                    not row.reads,
                    served.get(row.owner, 0.0),
                    row.turn_s or 0.0,
                    row.key,
                ),
            )
            old.remove(most)
            found.append(most)
            used[most.owner] -= most.needed
            left -= most.needed
        return found


class _Turns:
    """Turns of texts, where not all of them fit."""

    def __init__(self, rows: Sequence[CacheRow], served: Mapping[str, float]) -> None:
        self._served = served
        self._read_s: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            self._read_s[row.owner] += row.read_s if row.waits else 0.0

    def begin_s(self, row: CacheRow) -> float:
        """What the owner of a text that waits had been served when it began to wait."""
        return self._served.get(row.owner, 0.0) - (row.turn_s or 0.0)

    def gives_way(self, row: CacheRow, waiting: CacheRow) -> bool:
        """Whether a text with room gives it to a waiting one.

        It does when its owner was served for a turn since the other waits, or for two turns, if it
        has not had room for one.
        """
        alike = row.owner == waiting.owner
        if alike and waiting.turn_s is None:
            return False
        read_s = self._read_s[row.owner] if alike else waiting.read_s
        length_s = max(LEAST_TURN_S, READ_AGAIN * read_s)
        is_fresh = row.turn_s is not None and row.turn_s <= length_s
        number = 2 if is_fresh else 1
        ahead_s = self._served.get(row.owner, 0.0) - self.begin_s(waiting)
        return ahead_s > number * length_s
