"""The delay before a wrong token or key is refused, which slows down guessing."""

import asyncio

from moaspec.support import limits


class RefusalDelay:
    """Delays refusals, at most `MAX_WRONG_TOKENS` at a time so that they hold few connections."""

    def __init__(self) -> None:
        self._waiting = 0

    async def wait(self) -> None:
        """Wait before a wrong token or key is refused; return at once if too many wait."""
        if self._waiting >= limits.MAX_WRONG_TOKENS:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(limits.WRONG_TOKEN_S)
        finally:
            self._waiting -= 1
