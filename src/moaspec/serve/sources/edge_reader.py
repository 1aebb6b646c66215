"""Translation between a device's session and the types of `source.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from moaspec.generation.options import GenerateOptions
from moaspec.remote.device.events import RemoteEvent
from moaspec.remote.device.remote_session import RemoteSession
from moaspec.sampling.grammar import GrammarProcessor
from moaspec.serve.sources.source import Job, Round, TokenSource, Update


@dataclass
class EventReader:
    """Turns a session's events, which replace the end of a text, into updates, which extend it.

    Attributes:
        job: the job in decoding.
        keep: whether provisional tokens become final without verification after a cut.
        token_ids, sources: the text so far, including provisional tokens.
        num_final: number of tokens that will not change any more.
    """

    job: Job
    keep: bool
    token_ids: list[int] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    num_final: int = 0

    def update(self, event: RemoteEvent, session: RemoteSession) -> Update:
        """The update for an event."""
        shown, first = len(self.token_ids), self.num_final
        self.token_ids[event.start :] = event.token_ids
        self.sources[event.start :] = event.sources
        if event.start <= first:
            self.num_final = max(first, event.start + len(event.token_ids) - event.num_provisional)
        sources = self.sources[first : self.num_final]
        if self.keep:
            kept = max(min(shown, self.num_final) - first, 0)
            sources[:kept] = ["device"] * kept
        provisional = self.token_ids[self.num_final :] if self.job.provisional else []
        verified = event.verified
        return Update(
            token_ids=tuple(self.token_ids[first : self.num_final]),
            sources=tuple(sources),
            logprobs=() if verified is None else verified.logprobs[: self.num_final - first],
            round=_round(event) if first else None,
            provisional=tuple(provisional),
            stop_reason=event.stop_reason,
            num_reused_tokens=session.result.num_reused_tokens,
            seed=session.result.seed,
        )


def _round(event: RemoteEvent) -> Round | None:
    verified = event.verified
    if verified is None:
        return None
    return Round(verified.tree, verified.accepted, len(verified.token_ids))


def row_options(job: Job, processors: tuple[GrammarProcessor, ...]) -> GenerateOptions:
    """Keyword arguments of a session for a job."""
    sampling = vars(job.sampling)
    options = {
        **{
            name: value
            for name, value in sampling.items()
            if name in GenerateOptions.__annotations__
        },
        "max_new_tokens": job.max_new_tokens,
        "stop": job.stop,
        "generation_config": None,
        "logits_processors": processors,
    }
    return cast("GenerateOptions", options)


def link_state(session: RemoteSession) -> Literal["up", "down", "syncing"]:
    """State of the session's link as docs/serve.md names it."""
    if session.stats.state == "up":
        return "syncing" if session.provisional else "up"
    return "down" if session.stats.state == "down" else "syncing"
