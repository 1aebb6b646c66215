"""vLLM's scheduler, told that drafts need cache slots.

Drafted tokens are written into SA's cache behind the newest token while the draft grows. vLLM
reserves slots for its own drafters' tokens and none for those of a custom class.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from moaspec.vllm_plugin.hooks import require


class MoAScheduler(Scheduler):
    """The stock scheduler with lookahead slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require(self, "num_lookahead_tokens", owner_name="Scheduler")
        self.num_lookahead_tokens = self.num_spec_tokens
