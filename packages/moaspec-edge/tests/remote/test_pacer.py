"""One direction of a link, as arithmetic."""

from __future__ import annotations

import statistics
from typing import get_args

import pytest

from moaspec_core.errors import InputError
from moaspec_edge.emulation import PRESETS, Jitter, LinkProfile, Pacer, link_named


def arrivals(
    link: LinkProfile, sent: list[float], size: int = 100, seed: int = 0
) -> list[float | None]:
    pacer = Pacer(link, seed)
    return [pacer.arrival(at, size) for at in sent]


def test_delay_and_rate() -> None:
    link = LinkProfile(name="x", delay_s=0.01, bits_per_s=8000)
    # 100 bytes take 0.1 s; the second waits for the first.
    assert arrivals(link, [0.0, 0.0, 1.0]) == pytest.approx([0.11, 0.21, 1.11])


def test_without_limits_packets_arrive_in_order() -> None:
    times = [one for one in arrivals(LinkProfile(name="x"), [0.0] * 5) if one is not None]
    assert times == sorted(times)
    assert len(set(times)) == 5


def test_what_waits_too_long_is_dropped() -> None:
    link = LinkProfile(name="x", bits_per_s=8000, queue_s=0.15)
    assert arrivals(link, [0.0] * 4) == [pytest.approx(0.1), pytest.approx(0.2), None, None]


def test_loss() -> None:
    link = LinkProfile(name="x", loss=0.25)
    lost = arrivals(link, [0.0] * 4000).count(None)
    # Within five standard deviations (27 packets each) of 1000.
    assert abs(lost - 1000) < 137


@pytest.mark.parametrize("jitter", get_args(Jitter))
def test_jitter(jitter: Jitter) -> None:
    link = LinkProfile(name="x", delay_s=0.02, jitter_s=0.01, jitter=jitter)
    sent = [0.002 * i for i in range(5000)]
    times = [one for one in arrivals(link, sent) if one is not None]
    delays = [arrived - at for arrived, at in zip(times, sent, strict=True)]
    assert (times == sorted(times)) == (jitter != "reorder")
    assert min(delays) >= 0
    waited = statistics.fmean(delays) - 0.02
    # 5000 draws, or 100 where one holds for 100 ms, of deviation 0.01: five times 0.01 / sqrt(n).
    if jitter == "in_order":
        assert waited > 0.005  # every packet waits for the slowest of those before it
    else:
        assert abs(waited) < {"reorder": 0.0007, "coherent": 0.005}[jitter]


def test_the_same_seed_is_the_same_link() -> None:
    sent = [0.01 * i for i in range(50)]
    assert arrivals(PRESETS["4g"], sent, seed=1) == arrivals(PRESETS["4g"], sent, seed=1)
    assert arrivals(PRESETS["4g"], sent, seed=1) != arrivals(PRESETS["4g"], sent, seed=2)


def test_names() -> None:
    assert link_named("lan") is PRESETS["lan"]
    reordering = link_named("4g:reorder")
    assert (reordering.name, reordering.jitter) == ("4g:reorder", "reorder")
    for wrong in ("6g", "4g:wild", ""):
        with pytest.raises(InputError):
            link_named(wrong)


@pytest.mark.parametrize("wrong", [{"delay_s": -1.0}, {"loss": 1.0}, {"bits_per_s": -5.0}])
def test_links_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        LinkProfile(name="x", **wrong)  # type: ignore[arg-type]
