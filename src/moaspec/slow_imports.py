"""A delay for whoever shows a wrong token or key."""

from __future__ import annotations

import asyncio

from moaspec import limits


class SlowDown:
    """Delays refusals; so few at a time that they cannot use up a server's connections."""

    def __init__(self) -> None:
        self._waiting = 0

    async def wait(self) -> None:
        """Before a wrong token is answered."""
        if self._waiting >= limits.MAX_WRONG_TOKENS:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(limits.WRONG_TOKEN_S)
        finally:
            self._waiting -= 1
