"""Who keeps keys and values when not all fit: nobody is refused, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moaspec_core.engine.cache_room import LEAST_TURN_S, CacheRoom, CacheRow


def row(key: int, owner: str, needed: int, *, waits: bool = False, priority: int = 0) -> CacheRow:
    return CacheRow(key=key, owner=owner, needed=needed, waits=waits, priority=priority, read_s=0.1)


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


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 99)), min_size=2, max_size=6),
    st.integers(20, 60),
)
def test_texts_without_an_end_come_to_their_turns(asked: list[tuple[str, int]], piece: int) -> None:
    """Sessions of devices: each is read in pieces and writes, again and again."""
    room, step_s = CacheRoom(100), 0.1
    served = dict.fromkeys((owner for owner, _ in asked), 0.0)
    unread = {key: length for key, (_, length) in enumerate(asked)}
    since, resting = dict.fromkeys(unread, 0.0), set(unread)
    lost, written = Counter[int](), Counter[int]()

    def rows() -> list[CacheRow]:
        return [
            CacheRow(
                key=key,
                owner=owner,
                needed=length,
                waits=key in resting,
                reads=key not in resting and unread[key] > 0,
                lost=lost[key],
                read_s=step_s * -(-length // piece) if key in resting else 0.0,
                turn_s=served[owner] - since[key],
            )
            for key, (owner, length) in enumerate(asked)
        ]

    def turn(key: int) -> None:
        since[key] = served[asked[key][0]]

    for step in range(400 * len(asked) * len(asked)):
        admitted = room.admitted(rows(), served)
        resting.difference_update(admitted)
        for key in admitted:
            turn(key)
        for key in room.set_back(rows(), admitted, served):
            resting.add(key)
            lost[key] += 1
            unread[key] = asked[key][1]
            turn(key)
        held = [key for key in unread if key not in resting]
        assert sum(asked[key][1] for key in held) <= room.limit
        # As in a pass of the least served: all that write, and a piece of one that is read.
        least = min(served[asked[key][0]] for key in held)
        held = [key for key in held if served[asked[key][0]] <= least + step_s]
        reading = [key for key in held if unread[key]]
        reading = reading and [min(reading, key=lambda key: served[asked[key][0]])]
        taken = reading + [key for key in held if not unread[key]]
        for key in taken:
            unread[key] = max(0, unread[key] - piece)
            written[key] += not unread[key]  # the last piece chooses a token
            lost[key] *= unread[key] > 0
            served[asked[key][0]] += step_s / len(taken)
        if step > 50 and min(written[key] for key in unread) >= 3:
            return
    raise AssertionError(f"some wrote little: {written}")
