"""vLLM's scheduler, told that drafts need cache slots.

Drafted tokens are written into SA's cache behind the newest token while the draft grows. vLLM
reserves slots for its own drafters' tokens and none for those of a custom class. Where drafts come
from devices, a request also goes on only when its device has sent some.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from moaspec.vllm_plugin.hooks import require


class MoAScheduler(Scheduler):
    """The stock scheduler with lookahead slots.

    Attributes:
        wanted: requests that the next steps are for, where somebody else says when each goes on;
            the others keep their slots and wait. None: steps are for all, as in stock vLLM.
    """

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("num_lookahead_tokens", "running", "requests"):
            require(self, name, owner_name="Scheduler")
        self.num_lookahead_tokens = self.num_spec_tokens
        self.wanted: set[str] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """The next step."""
        if self.wanted is None:
            return super().schedule(*args, **kwargs)
        parked = [one for one in self.running if one.request_id not in self.wanted]
        self.running = [one for one in self.running if one.request_id in self.wanted]
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.running += parked
