"""Token counts of one text, for `usage`, the extension and metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moaspec_serve.sources.source import Update


@dataclass
class TokenCounts:
    """Counts that every update increases."""

    tokens: int = 0
    rounds: int = 0  # target verifications, except that of the prompt
    emitted: int = 0  # tokens emitted by rounds
    # drafted, accepted: tokens that the drafter proposed, and accepted tokens among them.
    drafted: int = 0
    accepted: int = 0
    copied: int = 0  # accepted tokens that n-gram branches proposed
    reused: int = 0  # prompt tokens found in a cache
    proposed: int = 0  # drafts of any proposer
    # Number of rounds with drafts, by how many of these they accepted.
    acceptances: Counter[int] = field(default_factory=Counter)
    # Start time, from `time.perf_counter`.
    started_s: float = field(default_factory=time.perf_counter)
    # first_s, latest_s: times of the first and the latest tokens; None before them.
    first_s: float | None = None
    latest_s: float | None = None

    def add(self, update: Update) -> None:
        self.reused = max(self.reused, update.num_reused_tokens)
        if update.token_ids:
            self.latest_s = time.perf_counter()
            self.first_s = self.first_s or self.latest_s
            self.tokens += len(update.token_ids)
        if update.round is not None:
            self.rounds += 1
            self.emitted += len(update.round.token_ids)
            drafts = len(update.round.tree.tokens)
            self.drafted += drafts - update.round.tree.num_copied
            self.proposed += drafts
            if drafts:
                self.acceptances[len(update.round.accepted)] += 1
        self.accepted += update.sources.count("draft")
        self.copied += update.sources.count("copy")

    @classmethod
    def total(cls, counts: Sequence[TokenCounts]) -> TokenCounts:
        names = ("tokens", "rounds", "emitted", "drafted", "accepted", "copied", "proposed")
        return cls(
            acceptances=sum((each.acceptances for each in counts), Counter()),
            **{name: sum(getattr(each, name) for each in counts) for name in names},
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Rate since the first token; None before the second."""
        if self.first_s is None or self.latest_s is None or self.latest_s <= self.first_s:
            return None
        return (self.tokens - 1) / (self.latest_s - self.first_s)

    def speculation(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "tau": self.emitted / self.rounds if self.rounds else None,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "copied": self.copied,
        }

    @property
    def drafting_rounds(self) -> int:
        """Rounds with drafts."""
        return self.acceptances.total()

    @property
    def accepted_drafts(self) -> int:
        """Accepted drafts of any proposer."""
        return sum(number * rounds for number, rounds in self.acceptances.items())

    def vllm_metrics(self) -> dict[str, Any] | None:
        """The object `metrics` of vLLM's answers; None without drafts.

        Rounds without drafts do not count there.
        """
        if not self.drafting_rounds:
            return None
        histogram = [self.acceptances[number] for number in range(max(self.acceptances) + 1)]
        found = {
            "mean_acceptance_length": 1 + self.accepted_drafts / self.drafting_rounds,
            "draft_acceptance_rate": self.accepted_drafts / self.proposed,
            "acceptance_histogram": histogram,
            "num_spec_steps": self.drafting_rounds,
            "num_accepted_draft_tokens": self.accepted_drafts,
            "num_draft_tokens": self.proposed,
        }
        return {"speculative_decoding": found}

    def stats(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            **self.speculation(),
            "tokens_per_second": self.tokens_per_second,
            "elapsed_s": time.perf_counter() - self.started_s,
        }
