"""The interface between the HTTP endpoints and the decoder behind them.

`LocalSource` decodes with an engine in this process, `EdgeSource` with sessions of a remote target.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

from moaspec.drafting.draft_tree import DraftTree
from moaspec.engine.result import Source, StopReason
from moaspec.errors import InputError
from moaspec.sampling.grammar import Grammars
from moaspec.sampling.incremental_text import TokenBytes
from moaspec.sampling.params import Alternatives, SamplingParams
from moaspec.target.generation_defaults import GenerationDefaults

T = TypeVar("T")
TokenSource = Source | Literal["device"]
"""`Source`, or "device": kept text that a device wrote without its server."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One text to generate.

    Attributes:
        prompt_ids: at least one token id.
        max_new_tokens: maximum number of generated tokens.
        stop: strings that end the text.
        sampling: how tokens are chosen.
        grammar: grammar of the text, see `sampling.grammar`; None allows any text.
        speculation: whether to draft; False decodes plainly.
        provisional: whether to report text that is not verified yet.
        tenant: owner of the request; tenants share no caches.
        client: key whose share of the server it uses; "" if there are not several keys.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    sampling: SamplingParams
    grammar: str | None = None
    speculation: bool = True
    provisional: bool = False
    tenant: str = ""
    client: str = ""


@dataclass(frozen=True)
class Round:
    """One target verification.

    Attributes:
        tree: the draft.
        accepted: accepted nodes of the tree, in order.
        emitted: number of tokens that the round added to the text.
    """

    tree: DraftTree
    accepted: tuple[int, ...]
    emitted: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """New tokens of one text since the previous update.

    Attributes:
        token_ids: final tokens: verified, or kept ones with source "device".
        sources: proposer of each token.
        logprobs, top_logprobs: log-probabilities of each token, if the job requests them.
        round: the verification that gave the tokens; None for the prompt's first token.
        provisional: all unverified tokens after the final text.
        stop_reason: set on the last update.
        num_reused_tokens: prompt tokens found in a cache.
        seed: seed of sampling.
    """

    token_ids: tuple[int, ...] = ()
    sources: tuple[TokenSource, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    round: Round | None = None
    provisional: tuple[int, ...] = ()
    stop_reason: StopReason | None = None
    num_reused_tokens: int = 0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """The link to a remote target; also its JSON form in docs/serve.md.

    Attributes:
        state: state of the latest session.
        round_trip_s: latest measured round trip; None if unknown.
        bytes_sent, bytes_received: totals since the start.
        can_cut: whether the link is emulated and can be cut.
        cut: whether it is cut now.
    """

    state: Literal["up", "down", "syncing"]
    round_trip_s: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    can_cut: bool = False
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Properties of the model behind a source.

    Attributes:
        name: model name in responses.
        mode: see `docs/serve.md`.
        tokenizer: a tokenizer of transformers.
        vocab_size, max_positions, stop_token_ids: those of the target.
        defaults: sampling defaults for fields that a request does not set.
        speculates: whether there is a drafter.
        grammars: compiles grammars for the target's tokenizer.
        fingerprint: changes when the same seed may give another text.
    """

    name: str
    mode: Literal["local", "edge"]
    tokenizer: Any
    vocab_size: int
    max_positions: int
    stop_token_ids: frozenset[int]
    defaults: GenerationDefaults
    speculates: bool
    grammars: Grammars
    fingerprint: str

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of single tokens inside a text."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(len(token) for token in self.tokenizer.get_vocab())


@dataclass(frozen=True)
class Load:
    """Number of texts in decoding, and of texts that wait."""

    active: int = 0
    waiting: int = 0


Report = Callable[[int, Update | Exception], None]
"""(index of a job, its next update or the error that ended it). Called on the event loop."""

Cancel = Callable[[], Awaitable[None]]
"""Cancels the unfinished jobs of one request. May be called more than once."""


class TextSource(Protocol):
    """Decodes many jobs concurrently."""

    facts: SourceFacts

    async def start(self) -> None:
        """Start decoding on the running event loop."""
        ...

    async def close(self) -> None:
        """End all jobs with `BusyError` and free everything."""
        ...

    def submit(self, jobs: Sequence[Job], report: Report) -> Cancel:
        """Accept all jobs or none, and decode them.

        Args:
            jobs: texts of one request.
            report: receives each update, up to one with a `stop_reason`, or an error.

        Raises:
            InputError: a job is invalid.
            BusyError: the source is full.
        """
        ...

    @property
    def load(self) -> Load:
        """Current number of texts."""
        ...

    @property
    def link(self) -> LinkState | None:
        """The link to a remote target; None if the target is local."""
        ...

    def cut(self, cut: bool) -> bool:
        """Cut or restore an emulated link; returns False if there is none."""
        ...


def entry_to_evict(
    entries: Sequence[T], tenant: Callable[[T], str], size: Callable[[T], int] = lambda _: 1
) -> T:
    """The oldest entry of the tenant whose entries are largest in total.

    Args:
        entries: all entries, the oldest first.
        tenant: returns the owner of an entry.
        size: returns the size of an entry.
    """
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[tenant(entry)] += size(entry)
    largest = max(sizes.values())
    return next(entry for entry in entries if sizes[tenant(entry)] == largest)


def check_num_texts(num_texts: int, limit: int) -> None:
    """Raise InputError for a request of more texts than the server ever accepts together."""
    if num_texts > limit:
        raise InputError(
            f"The request asks for {num_texts} texts (prompts times n), and this server takes "
            f"{limit} together; ask for fewer."
        )


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def client_share(places: int, share: float, client: str) -> int:
    """Number of places that a client may use; all if clients are not told apart."""
    return max(1, int(places * share)) if client else places
