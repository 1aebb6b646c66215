"""Who keeps keys and values when not all fit: nobody is refused, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moaspec_core.engine.cache_room import LEAST_TURN_S, CacheRoom, CacheRow


def row(key: int, owner: str, needed: int, *, waits: bool = False, priority: int = 0) -> CacheRow:
    held = 0 if waits else needed
    return CacheRow(
        key=key, owner=owner, held=held, needed=needed, waits=waits, priority=priority, read_s=0.1
    )


def test_the_owner_that_holds_most_gives_its_newest_row() -> None:
    rows = [row(0, "a", 40), row(1, "b", 20), row(2, "a", 40), row(3, "b", 10)]
    assert CacheRoom(100).set_back(rows, []) == [2]
    assert CacheRoom(110).set_back(rows, []) == []
    urgent = [replace(one, priority=-one.key) for one in rows]
    assert CacheRoom(100).set_back(urgent, []) == [0]


def test_a_small_text_takes_room_at_once_and_a_large_one_when_its_turn_comes() -> None:
    room = CacheRoom(100)
    rows = [row(0, "a", 50), row(1, "a", 50)]
    small, large = row(2, "b", 30, waits=True), row(2, "b", 60, waits=True)
    assert room.admitted([*rows, small], {}) == [2]
    assert room.set_back([*rows, small], [2]) == [1]
    assert room.admitted([*rows, large], {"a": 0.9 * LEAST_TURN_S, "b": 0.0}) == []
    assert room.admitted([*rows, large], {"a": 1.1 * LEAST_TURN_S, "b": 0.0}) == [2]
    assert room.set_back([*rows, large], [2]) == [1, 0]


def test_an_owner_alone_fills_its_room_in_order() -> None:
    rows = [row(key, "a", 40, waits=True) for key in range(4)]
    assert CacheRoom(100).admitted(rows, {}) == [0, 1]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90), st.integers(1, 30)), min_size=1)
)
def test_every_text_ends_within_the_limit(asked: list[tuple[str, int, int]]) -> None:
    """Texts of so many tokens, and tokens to write; one alone may be larger than the room."""
    room = CacheRoom(100)
    lengths = {key: length for key, (_, length, _) in enumerate(asked)}
    left = {key: new for key, (_, _, new) in enumerate(asked)}
    resting, served = set(left), dict.fromkeys("abc", 0.0)
    for _ in range(200 * len(asked)):
        if not left:
            return
        rows = [row(key, asked[key][0], lengths[key] + 1, waits=key in resting) for key in left]
        admitted = room.admitted(rows, served)
        resting -= {*admitted}
        rows = [replace(one, waits=one.key in resting) for one in rows]
        resting |= {*room.set_back(rows, admitted)}
        held = [key for key in left if key not in resting]
        assert held
        assert len(held) == 1 or sum(lengths[key] + 1 for key in held) <= room.limit
        for key in held:
            served[asked[key][0]] += 0.1
            lengths[key] += 1
            left[key] -= 1
            if not left[key]:
                del left[key]
    raise AssertionError(f"these never end: {left}")
