"""How many requests to have under way at a server at once."""

FIRST, MOST = 16, 1024
LEAST_GAIN = 1.05
"""Factor of the speed by which a larger number must be faster to be kept."""
GROWTH, CAREFUL_GROWTH = 2.0, 1.25
"""Of the number, until the server was too busy once, and afterwards."""
LEAST_ANSWERS = 32  # by which a number is judged
WAIT = 8  # measurements until a larger number is tried again


class Concurrency:
    """The number of requests to one server, found by its speed.

    The number grows as long as the server gives more tokens a second, and goes back to the fastest
    one otherwise. It is halved when the server refuses requests because it is busy, or is out of
    reach.

    Args:
        fixed: a number that stays; None finds one.

    Attributes:
        limit: the number.
        running: requests under way, which the caller counts.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.limit, self.running = fixed or FIRST, 0
        self._is_fixed, self._growth, self._wait = fixed is not None, GROWTH, 0
        self._fastest = (self.limit, 0.0)  # a number, and its tokens a second
        self._begin()

    @property
    def is_free(self) -> bool:
        return self.running < self.limit

    def answered(self, tokens: int, now_s: float) -> None:
        """Take in an answer that came at this time."""
        if self._is_fixed:
            return
        self._answers += 1
        if self._answers <= self.limit:  # of requests that began with another number
            self._since_s = now_s
            return
        self._tokens += tokens
        if self._answers >= self.limit + max(self.limit, LEAST_ANSWERS):
            self._judge(self._tokens / max(now_s - self._since_s, 1e-9))
            self._begin()

    def refused(self) -> None:
        """Take in that the server was too busy for a request.

        Nothing changes until no more requests are under way than the number allows.
        """
        if self._is_fixed or self.running > self.limit:
            return
        self.limit = max(1, self.limit // 2)
        self._fastest, self._growth, self._wait = (self.limit, 0.0), CAREFUL_GROWTH, 0
        self._begin()

    def _begin(self) -> None:
        self._answers = self._tokens = 0
        self._since_s = 0.0

    def _judge(self, tokens_per_s: float) -> None:
        number, most = self._fastest
        if self._wait:
            self._wait -= 1
            self._fastest = (self.limit, tokens_per_s)
        elif tokens_per_s > LEAST_GAIN * most:
            self._fastest = (self.limit, tokens_per_s)
            self.limit = min(MOST, max(self.limit + 1, int(self._growth * self.limit)))
        else:
            self.limit, self._wait = number, WAIT
