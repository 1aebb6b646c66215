"""vLLM's scheduler with cache slots reserved for drafted tokens.

While a draft grows, its tokens are written into the self-attention cache behind the newest token.
vLLM reserves slots for the drafts of its own drafters, but not for those of a custom class.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from moaspec_vllm.hooks import require


class MoAScheduler(Scheduler):
    """The stock scheduler with lookahead slots.

    Attributes:
        wanted: ids of the requests that the next steps run. The other requests keep their slots
            and wait, for example until their device has sent drafts. None: every step runs all
            requests, as in stock vLLM.
    """

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("num_lookahead_tokens", "running", "requests"):
            require(self, name, owner_name="Scheduler")
        self.num_lookahead_tokens = self.num_spec_tokens
        self.wanted: set[str] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.wanted is None:
            return super().schedule(*args, **kwargs)
        waiting = [request for request in self.running if request.request_id not in self.wanted]
        self.running = [request for request in self.running if request.request_id in self.wanted]
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.running += waiting
