"""Runs sessions and servers in simulated time, so that figures are the same on every machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

from fleet_sim.simulation import SkippingLoop, simulated_clock
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_edge.server.shared_verifier import SharedVerifier

T = TypeVar("T")


def run_simulated(work: Coroutine[Any, Any, T], pass_s: float = 0.0, token_s: float = 0.0) -> T:
    """Run `work` in a loop whose clock skips all waiting.

    Args:
        pass_s, token_s: seconds of a pass, and of each token in it; nothing else takes time.
    """

    async def decide(
        shared: SharedVerifier, requests: list[VerifyRequest]
    ) -> list[VerifyResult | Exception]:
        tokens = sum(len(one.new_tokens) + len(one.tree.tokens) for one in requests)
        await asyncio.sleep(pass_s + token_s * tokens)
        return shared._decide(requests)  # in no thread, whose time would be real

    async def run() -> T:
        with simulated_clock(), patch.object(SharedVerifier, "_pass", decide):
            return await work

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(run())
