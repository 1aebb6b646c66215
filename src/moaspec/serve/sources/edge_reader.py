"""What a device's session says, in the words of `source.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moaspec.generation.options import RowOptions
from moaspec.remote.device.events import RemoteEvent
from moaspec.remote.device.remote_session import RemoteSession
from moaspec.sampling.grammar import GrammarProcessor
from moaspec.sampling.params import SamplingParams
from moaspec.serve.sources.source import Job, Round, TokenSource, Update


@dataclass
class Reader:
    """Turns a session's events, which replace the end of a text, into updates, which add to it.

    Attributes:
        job: what is decoded.
        keep: whether what was provisional becomes final without being verified.
        token_ids, sources: the text as shown, provisional tokens included.
        settled: how many of them will not change any more.
    """

    job: Job
    keep: bool
    token_ids: list[int] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    settled: int = 0

    def take(self, event: RemoteEvent, session: RemoteSession) -> Update:
        """What is new in this event."""
        shown, first = len(self.token_ids), self.settled
        self.token_ids[event.start :] = event.token_ids
        self.sources[event.start :] = event.sources
        if event.start <= first:
            self.settled = max(first, event.start + len(event.token_ids) - event.num_provisional)
        sources = self.sources[first : self.settled]
        if self.keep:
            kept = max(min(shown, self.settled) - first, 0)
            sources[:kept] = ["device"] * kept
        provisional = self.token_ids[self.settled :] if self.job.provisional else []
        said = event.verified
        return Update(
            token_ids=tuple(self.token_ids[first : self.settled]),
            sources=tuple(sources),
            logprobs=() if said is None else said.logprobs[: self.settled - first],
            round=_round(event) if first else None,
            provisional=tuple(provisional),
            stop_reason=event.stop_reason,
            num_reused_tokens=session.result.num_reused_tokens,
            seed=session.result.seed,
        )


def _round(event: RemoteEvent) -> Round | None:
    said = event.verified
    return None if said is None else Round(said.tree, said.accepted, len(said.token_ids))


def row_options(job: Job, processors: tuple[GrammarProcessor, ...]) -> RowOptions:
    """A job as keyword arguments of a session."""
    sampling: SamplingParams = job.sampling
    return {
        "max_new_tokens": job.max_new_tokens,
        "stop": job.stop,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "choice": sampling.choice,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sampling.logit_bias,
        "rules": sampling.rules,
        "generation_config": None,
        "logprobs": sampling.logprobs,
        "logits_processors": processors,
    }


def link_state(session: RemoteSession) -> Literal["up", "down", "syncing"]:
    """The session's words in those of docs/serve.md."""
    if session.stats.state == "up":
        return "syncing" if session.provisional else "up"
    return "down" if session.stats.state == "down" else "syncing"
