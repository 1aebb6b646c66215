"""Counts of drafts as servers report them, in an answer or in Prometheus' format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DRAFTS, DRAFTED, ACCEPTED = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
"""Counters of vLLM's, which `moaspec serve` has too."""
_SAMPLE = re.compile(
    rf"^({DRAFTS}|{DRAFTED}|{ACCEPTED})(?:\{{[^}}]*\}})? +"
    r"(\d{1,18}(?:\.\d*)?(?:[eE]\+?\d{1,2})?)\s",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Speculation:
    """Counts of drafts.

    Attributes:
        rounds: verifications; 0 if the server does not tell.
        emitted: tokens that they gave, with bonus tokens.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Speculation) -> Speculation:
        names = ("rounds", "emitted", "drafted", "accepted")
        return Speculation(*(getattr(self, name) + getattr(other, name) for name in names))

    def __sub__(self, other: Speculation) -> Speculation:
        names = ("rounds", "emitted", "drafted", "accepted")
        return Speculation(*(getattr(self, name) - getattr(other, name) for name in names))

    @property
    def tau(self) -> float | None:
        """Tokens per verification; None if the server does not tell."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def read_speculation(answer: Mapping[str, Any]) -> Speculation:
    """The counts in an answer: moaspec's usage, vLLM's metrics, SGLang's, llama.cpp's timings."""
    usage, timings = answer.get("usage") or {}, answer.get("timings") or {}
    metrics = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    if own := usage.get("speculation"):
        rounds = int(own.get("rounds") or 0)
        emitted = round((own.get("tau") or 0.0) * rounds)
        return Speculation(rounds, emitted, int(own["drafted"]), int(own["accepted"]))
    if metrics:
        rounds = int(metrics.get("num_spec_steps") or 0)
        accepted = int(metrics.get("num_accepted_draft_tokens") or 0)
        drafted = int(metrics.get("num_draft_tokens") or 0)
        return Speculation(rounds, rounds + accepted, drafted, accepted)
    if "draft_n" in timings:  # it counts no verifications
        return Speculation(0, 0, int(timings["draft_n"]), int(timings.get("draft_n_accepted") or 0))
    return Speculation()


def read_counters(text: str) -> Speculation:
    """The counts of a whole server since its start, from its page of metrics."""
    totals: dict[str, float] = {}
    for name, value in _SAMPLE.findall(f"{text}\n"):
        totals[name] = totals.get(name, 0.0) + float(value)
    rounds, accepted = int(totals.get(DRAFTS, 0)), int(totals.get(ACCEPTED, 0))
    return Speculation(rounds, rounds + accepted, int(totals.get(DRAFTED, 0)), accepted)
