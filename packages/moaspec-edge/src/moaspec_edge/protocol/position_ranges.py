"""Sets of token positions as ranges."""

from collections.abc import Iterable, Iterator

PositionRange = tuple[int, int]  # positions start .. stop - 1


class PositionSet:
    """A set of positions of one text."""

    def __init__(self, runs: Iterable[PositionRange] = ()) -> None:
        self._flags = bytearray()
        for start, stop in runs:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add positions start .. stop - 1."""
        if stop > len(self._flags):
            self._flags.extend(bytes(stop - len(self._flags)))
        self._flags[start:stop] = b"\x01" * (stop - start)

    def discard(self, start: int, stop: int) -> None:
        """Remove positions start .. stop - 1."""
        stop = min(stop, len(self._flags))
        if start < stop:
            self._flags[start:stop] = bytes(stop - start)

    def cut(self, length: int) -> None:
        """Remove all positions from `length` on."""
        del self._flags[length:]

    def __len__(self) -> int:
        return self._flags.count(1)

    def runs(self) -> Iterator[PositionRange]:
        """The ranges of the set, ascending."""
        return self._find(1, len(self._flags))

    def gaps(self, length: int) -> Iterator[PositionRange]:
        """The missing ranges below `length`, ascending."""
        padded = PositionSet()
        padded._flags = self._flags[:length] + bytes(max(0, length - len(self._flags)))
        return padded._find(0, length)

    def first_gap(self, length: int, most: int) -> PositionRange | None:
        """The first missing range below `length`, cut to its first `most` positions."""
        start, stop = next(self.gaps(length), (length, length))
        return (start, min(stop, start + most)) if start < length else None

    def last_gap(self, length: int, most: int) -> PositionRange | None:
        """The last missing range below `length`, cut to its last `most` positions."""
        stop = length
        if length <= len(self._flags):
            stop = self._flags.rfind(0, 0, length) + 1
        if stop <= 0:
            return None
        start = self._flags.rfind(1, 0, min(stop, len(self._flags))) + 1
        return max(start, stop - most), stop

    def _find(self, flag: int, length: int) -> Iterator[PositionRange]:
        start = self._flags.find(flag)
        while 0 <= start < length:
            stop = self._flags.find(1 - flag, start)
            stop = length if stop < 0 else min(stop, length)
            yield start, stop
            start = self._flags.find(flag, stop)
