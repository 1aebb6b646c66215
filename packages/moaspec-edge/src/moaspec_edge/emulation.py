"""An emulated link: delays and loses messages in this process, without root.

Unlike TCP it loses and reorders messages; a session must work even so.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from moaspec_core.errors import InputError, LinkError
from moaspec_edge.protocol.transport import Connection, Transport

COHERENT_S = 0.1  # time for which a coherent delay is constant

APART_S = 1e-6  # least time between packets that arrive in order

Jitter = Literal["in_order", "reorder", "coherent"]
"""How delays vary. `in_order`: each packet draws its own, and none overtakes the one before it.
`reorder`: the same, and packets do overtake. `coherent`: one draw holds for 100 ms, in order. With
the same mean and deviation these are very different links: where packets draw alone and wait for
one another, each burst is as slow as its slowest packet."""


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One link, the same in both directions; InputError for a number outside its range."""

    name: str  # what tables call it
    delay_s: float = 0.0  # mean one-way delay
    jitter_s: float = 0.0  # standard deviation of the one-way delay; no delay is negative
    jitter: Jitter = "in_order"  # how delays vary, see `Jitter`
    bits_per_s: float = 0.0  # rate; 0 is without limit
    loss: float = 0.0  # probability that a packet is lost
    # What waits longer than this for the rate is dropped, as a router's buffer does.
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
    """A preset, also with another jitter model: `4g`, `4g:reorder`; InputError for others."""
    preset, _, jitter = name.partition(":")
    if preset not in PRESETS or jitter not in ("", *get_args(Jitter)):
        raise InputError(
            f"Unknown link {name!r}; use one of {', '.join(PRESETS)}, and after a colon "
            f"{', '.join(get_args(Jitter))}."
        )
    found = PRESETS[preset]
    return replace(found, name=name, jitter=jitter) if jitter else found  # type: ignore[arg-type]


class Pacer:
    """One direction of a link, with a seed of losses and delays."""

    def __init__(self, link: LinkProfile, seed: int = 0) -> None:
        self.link = link
        self._random = random.Random(seed)  # noqa: S311 - an emulation, nothing secret
        self._free_at = 0.0
        self._last = 0.0
        self._window, self._window_delay = -1, 0.0

    def arrival(self, now: float, num_bytes: int) -> float | None:
        """Time at which a packet arrives, on the caller's clock; None if it is lost.

        Args:
            now: time at which it is sent; must not decrease between calls.
            num_bytes: size on the wire.
        """
        sent = max(now, self._free_at)
        if self.link.bits_per_s and sent - now > self.link.queue_s:
            return None
        if self.link.bits_per_s:
            sent += 8 * num_bytes / self.link.bits_per_s
        # A lost packet has used the link, too.
        self._free_at = sent
        if self.link.loss and self._random.random() < self.link.loss:
            return None
        arrives = sent + self._delay(sent)
        if self.link.jitter != "reorder":
            # Different times keep the order well defined.
            arrives = self._last = max(arrives, self._last + APART_S)
        return arrives

    def _delay(self, at: float) -> float:
        if self.link.jitter != "coherent":
            return self._drawn()
        window = int(at / COHERENT_S)
        if window != self._window:
            self._window, self._window_delay = window, self._drawn()
        return self._window_delay

    def _drawn(self) -> float:
        if not self.link.jitter_s:
            return self.link.delay_s
        return max(0.0, self._random.gauss(self.link.delay_s, self.link.jitter_s))


@dataclass
class Faults:
    """Whether the link is cut; may be changed while a session runs.

    While it is cut, no message passes and no connection is made, without any error.
    """

    cut: bool = False


class ShapedTransport:
    """Delays, limits and loses what a transport carries, and cuts it with `faults`."""

    def __init__(self, inner: Transport, link: LinkProfile, faults: Faults | None = None) -> None:
        self._inner, self._link = inner, link
        self.faults = Faults() if faults is None else faults
        self._made = 0

    async def connect(self) -> Connection:
        """Open a connection; LinkError, after a pause, while the link is cut."""
        if self.faults.cut:
            # A session must not rely on a quick refusal.
            await asyncio.sleep(0.05)
            raise LinkError("The emulated link is cut.")
        await asyncio.sleep(2 * self._link.delay_s)
        self._made += 1
        up, down = (Pacer(self._link, 2 * self._made + way) for way in (0, 1))
        return _ShapedConnection(await self._inner.connect(), self.faults, up, down)


class _ShapedConnection:
    """One connection over the emulated link."""

    def __init__(self, inner: Connection, faults: Faults, up: Pacer, down: Pacer) -> None:
        self._inner, self._faults, self._up, self._down = inner, faults, up, down
        self._arrived: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._closed = False
        self._start(self._read())

    async def send(self, frame: bytes) -> None:
        if self._closed:
            raise LinkError("The connection was closed.")
        self._carry(frame, self._up, self._hand_over)

    async def _hand_over(self, frame: bytes) -> None:
        # Messages may arrive at the same time, but a connection takes one at a time.
        async with self._sending:
            await self._inner.send(frame)

    async def receive(self) -> bytes:
        if self._closed and self._arrived.empty():
            raise LinkError("The connection was closed.")
        frame = await self._arrived.get()
        if isinstance(frame, Exception):
            self._closed = True
            raise frame
        return frame

    async def close(self) -> None:
        self._closed = True
        self._arrived.put_nowait(LinkError("The connection was closed."))
        for task in list(self._tasks):
            task.cancel()
        await self._inner.close()

    async def _read(self) -> None:
        try:
            while True:
                self._carry(await self._inner.receive(), self._down, self._arrived.put)
        except Exception as error:  # noqa: BLE001 - the receiver raises it
            self._arrived.put_nowait(error)

    def _carry(
        self, frame: bytes, pacer: Pacer, deliver: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Deliver a message late, or never."""
        now = asyncio.get_running_loop().time()
        at = pacer.arrival(now, len(frame))
        if at is not None and not self._faults.cut:
            self._start(self._deliver(frame, at - now, deliver))

    async def _deliver(
        self, frame: bytes, after_s: float, deliver: Callable[[bytes], Awaitable[None]]
    ) -> None:
        if after_s > 0:
            await asyncio.sleep(after_s)
        # A cut also drops messages that are on their way.
        if self._faults.cut:
            return
        try:
            await deliver(frame)
        except LinkError:
            pass  # the receiver gets it
        except Exception as error:  # noqa: BLE001 - the receiver raises it
            self._arrived.put_nowait(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
