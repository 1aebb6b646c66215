"""Parameters of an emulated link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from moaspec.errors import InputError

Jitter = Literal["in_order", "reorder", "coherent"]
"""How delays vary. `in_order`: each packet draws its own, and none overtakes the one before it.
`reorder`: the same, and packets do overtake. `coherent`: one draw holds for 100 ms, in order. With
the same mean and deviation these are very different links: where packets draw alone and wait for
one another, each burst is as slow as its slowest packet."""


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One link, the same in both directions.

    Attributes:
        name: what tables call it.
        delay_s: mean one-way delay.
        jitter_s: standard deviation of the one-way delay; no delay is negative.
        jitter: how delays vary, see `Jitter`.
        bits_per_s: rate; 0 is without limit.
        loss: probability that a packet is lost.
        queue_s: what waits longer than this for the rate is dropped, as a router's buffer does.

    Raises:
        InputError: a number outside its range.
    """

    name: str
    delay_s: float = 0.0
    jitter_s: float = 0.0
    jitter: Jitter = "in_order"
    bits_per_s: float = 0.0
    loss: float = 0.0
    queue_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "bits_per_s", "queue_s"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.loss < 1:
            raise InputError(f"loss must be at least 0 and below 1, got {self.loss}.")


PRESETS = {
    link.name: link
    for link in (
        LinkProfile(name="none"),
        # The paper's wired link: 9 ms there and back.
        LinkProfile(name="lan", delay_s=0.0045, bits_per_s=50e6),
        # The paper's mobile links: normally distributed one-way delays.
        LinkProfile(
            name="4g",
            delay_s=0.021,
            jitter_s=0.019,
            jitter="coherent",
            bits_per_s=20e6,
            loss=0.001,
        ),
        LinkProfile(
            name="5g",
            delay_s=0.010,
            jitter_s=0.010,
            jitter="coherent",
            bits_per_s=100e6,
            loss=0.001,
        ),
    )
}
"""Links of arXiv 2410.03804, section 5. It gives no rate for 5G, 100 Mbit/s is ours. It does
not say how delays vary: the default here is `coherent`, as radio cells change over many packets."""


def link_named(name: str) -> LinkProfile:
    """A preset, or one with another jitter model: `4g`, `4g:reorder`.

    Raises:
        InputError: no such preset or model.
    """
    preset, _, jitter = name.partition(":")
    if preset not in PRESETS or jitter not in ("", *get_args(Jitter)):
        raise InputError(
            f"Unknown link {name!r}; use one of {', '.join(PRESETS)}, and after a colon "
            f"{', '.join(get_args(Jitter))}."
        )
    found = PRESETS[preset]
    return replace(found, name=name, jitter=jitter) if jitter else found  # type: ignore[arg-type]
