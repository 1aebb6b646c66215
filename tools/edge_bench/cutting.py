"""The link is cut in the middle of a text, and comes back."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from edge_bench.case import Case
from edge_bench.emulated_device import SlowedDevice
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.events import RemoteEvent
from moaspec_edge.device.link import MAX_BACKOFF_S
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.transport import Transport


async def cut_and_return(
    case: Case,
    device: Device,
    transport: Transport,
    prompt: Sequence[int],
    *,
    ask: Callable[[str], Awaitable[float]],
    after: int,
    alone: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Decode a text whose link is cut after some tokens, and mended after some without it.

    Args:
        case: how the device drafts.
        device: drafts.
        transport: leads to the server.
        prompt: token ids.
        ask: "cut" or "mend"; returns `time.monotonic` of when it was done.
        after: verified tokens before the cut.
        alone: provisional tokens before the link is mended.
        max_new_tokens: of the whole text.

    Returns:
        Seconds: `noticed_s` from the cut to when it was noticed, `next_s` from then to the next
        token, `back_s` from mending to the verified prefix, and `back_limit_s`, its upper limit:
        the longest pause between attempts, four round trips and a pass. Verified tokens per second
        before the cut and after the return. The text written without a link, and how much of it was
        kept. The final text.
    """
    slowed = SlowedDevice(device, case.step_s)
    options = RemoteOptions(
        num_target_layers=case.num_target_layers,
        draft=Chain(case.drafted) if case.drafted else "auto",
        max_provisional=alone,
    )
    session = RemoteSession(slowed, transport, options)
    log, text, wrote = _Log(), list[int](), list[int]()
    async for event in session.stream(prompt, max_new_tokens=max_new_tokens):
        text[event.start :] = event.token_ids
        if log.note(event):
            wrote = wrote or text[log.verified :]
        if log.cut_s is None and not log.provisional and len(text) >= after:
            log.cut_s, log.verified = await ask("cut"), len(text)
        if log.mend_s is None and log.provisional >= alone:
            wrote = text[log.verified :]
            log.mend_s = await ask("mend")
    if log.cut_s is not None and log.mend_s is None:
        log.mend_s = await ask("mend")
    stats = session.stats
    await session.close()
    return {
        "noticed_s": _between(log.cut_s, stats.down_s),
        "next_s": _between(stats.down_s, log.next_s),
        "back_s": _between(log.mend_s, log.back_s),
        "back_limit_s": MAX_BACKOFF_S + 4 * (stats.rtt_s or 0.0) + stats.rounds[-1].pass_s,
        "before_per_s": log.rate(0.0, log.cut_s),
        "after_per_s": log.rate(log.back_s, math.inf),
        "before": log.verified,
        "alone": wrote,
        "provisional": stats.provisional,
        "corrected": stats.corrected,
        "text": text,
    }


class _Log:
    """When what happened.

    Attributes:
        verified: tokens of the text that were, when the link was cut.
        provisional: tokens that now are not.
    """

    def __init__(self) -> None:
        self.cut_s: float | None = None
        self.mend_s: float | None = None
        self.next_s: float | None = None
        self.back_s: float | None = None
        self.verified = self.provisional = 0
        self._lengths: list[tuple[float, int]] = []

    def rate(self, since_s: float | None, until_s: float | None) -> float | None:
        """Verified tokens per second between two moments; None where there were no two events."""
        if since_s is None or until_s is None:
            return None
        seen = [length for length in self._lengths if since_s <= length[0] <= until_s]
        if len(seen) < 2:
            return None
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return (last - first) / (last_s - first_s)

    def note(self, event: RemoteEvent) -> bool:
        """Take in an event; whether it is the first verified one after the link came back."""
        now = time.monotonic()
        self._lengths.append((now, event.start + len(event.token_ids) - event.num_provisional))
        provisional = event.num_provisional == len(event.token_ids) and event.link != "up"
        # Also before the cut: a busy machine may take its own link for dead.
        self.provisional = event.num_provisional + (self.provisional if provisional else 0)
        if self.cut_s is None:
            return False
        if provisional:
            self.next_s = self.next_s or now
        elif self.mend_s is None:
            # A verdict that was on its way when the link was cut.
            self.verified = event.start + len(event.token_ids) - event.num_provisional
        elif self.back_s is None:
            self.back_s = now
            return True
        return False


def _between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start
