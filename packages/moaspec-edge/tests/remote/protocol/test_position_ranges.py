"""Sets of positions against Python's own sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moaspec_edge.protocol.position_ranges import PositionSet

RUNS = st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 5)), max_size=8)


@given(RUNS, st.integers(0, 20), st.integers(1, 6))
def test_runs_and_gaps(steps: list[tuple[bool, int, int]], length: int, most: int) -> None:
    positions, expected = PositionSet(), set[int]()
    for put, start, size in steps:
        (positions.add if put else positions.discard)(start, start + size)
        run = set(range(start, start + size))
        expected = expected | run if put else expected - run
    assert len(positions) == len(expected)
    assert {p for start, stop in positions.runs() for p in range(start, stop)} == expected
    missing = set(range(length)) - expected
    assert {p for start, stop in positions.gaps(length) for p in range(start, stop)} == missing
    first, last = positions.first_gap(length, most), positions.last_gap(length, most)
    if not missing:
        assert first is last is None
        return
    assert first is not None
    assert last is not None
    assert first[0] == min(missing)
    assert last[1] == max(missing) + 1
    for start, stop in (first, last):
        assert 0 < stop - start <= most
        assert set(range(start, stop)) <= missing


def test_what_is_cut_is_forgotten() -> None:
    positions = PositionSet([(0, 4), (6, 9)])
    positions.cut(7)
    assert list(positions.runs()) == [(0, 4), (6, 7)]
