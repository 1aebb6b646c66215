"""Where text comes from: the seam between HTTP and whatever decodes.

`moaspec serve` puts an engine behind it (`local.py`), `moaspec edge` sessions with a remote target.
Handlers know nothing but this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, Self, TypeVar

from moaspec.drafting.draft_tree import DraftTree
from moaspec.engine.result import Source, StopReason
from moaspec.errors import InputError
from moaspec.sampling.grammar import Grammars
from moaspec.sampling.incremental_text import TokenBytes
from moaspec.sampling.params import Alternatives, SamplingParams
from moaspec.target.generation_defaults import GenerationDefaults

T = TypeVar("T")
TokenSource = Source | Literal["device"]
"""`Source`, or a device that wrote alone and was told to keep it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One text to write.

    Attributes:
        prompt_ids: at least one token id.
        max_new_tokens: at most so many.
        stop: strings that end the text.
        sampling: how tokens are chosen.
        grammar: see `sampling/grammar.py`; the text follows it. None: any text.
        speculation: False decodes plainly.
        provisional: whether text that is not verified yet is wanted.
        tenant: whose request it is; nothing is shared between tenants.
        client: whose share of the places it takes; "" where a server has not several keys.
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
    """One verification.

    Attributes:
        tree: what was drafted.
        accepted: nodes of it that the target chose, in order.
        emitted: tokens that the round gave to the text.
    """

    tree: DraftTree
    accepted: tuple[int, ...]
    emitted: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """What happened to one text since the update before.

    Attributes:
        token_ids: verified (or, with source "device", kept) tokens; never taken back.
        sources: who proposed each.
        logprobs, top_logprobs: of each, where the job asks for them.
        round: the verification behind them, if there was one.
        provisional: all tokens that are written and not verified, after all of the text.
        stop_reason: set on the last update.
        num_reused_tokens: tokens of the prompt that were not computed again.
        seed: of sampling.
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
    """The way to a remote target.

    Attributes:
        state: see `docs/serve.md`.
        round_trip_s: last measured; None when unknown.
        bytes_sent, bytes_received: since the start.
        can_cut: whether it is an emulated link that may be cut.
        cut: whether it has been.
    """

    state: Literal["up", "down", "syncing"]
    round_trip_s: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    can_cut: bool = False
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What handlers must know of the model behind a source.

    Attributes:
        name: how responses call it.
        mode: see `docs/serve.md`.
        tokenizer: of transformers.
        vocab_size, max_positions, stop_token_ids: the target's.
        defaults: what holds where a request says nothing.
        speculates: whether there is a drafter.
        grammars: of the target's tokenizer.
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
        """What single tokens are within a text."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: at most so many times the context fit into it."""
        return max(len(token) for token in self.tokenizer.get_vocab())


@dataclass(frozen=True)
class Load:
    """Requests that are being decoded, and requests that wait for room."""

    active: int = 0
    waiting: int = 0


class Updates(Protocol):
    """What becomes of one job: an asynchronous iterator. It raises what ends the job early."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Update: ...

    async def aclose(self) -> None:
        """Abort the job if it is not done; may be called at any time, more than once."""
        ...


class TextSource(Protocol):
    """Decodes jobs, many at a time."""

    facts: SourceFacts

    async def start(self) -> None:
        """Begin to work, on the running event loop."""
        ...

    async def close(self) -> None:
        """End what is running and let go of everything."""
        ...

    def open(self, jobs: Sequence[Job]) -> list[Updates]:
        """Accept jobs, all or none, and decode them.

        Raises:
            InputError: a job that cannot be decoded.
            BusyError: no room.
        """
        ...

    @property
    def load(self) -> Load:
        """How busy it is."""
        ...

    @property
    def link(self) -> LinkState | None:
        """The link to a remote target; None where there is none."""
        ...

    def cut(self, cut: bool) -> bool:
        """Cut or restore an emulated link; False where there is none."""
        ...


def first_to_go(
    held: Sequence[T], tenant: Callable[[T], str], size: Callable[[T], int] = lambda _: 1
) -> T:
    """The entry to evict: the oldest of the tenant that holds most.

    Args:
        held: entries, the oldest first.
        tenant: the owner of an entry.
        size: how much an entry takes.
    """
    sizes: Counter[str] = Counter()
    for one in held:
        sizes[tenant(one)] += size(one)
    most = max(sizes.values())
    return next(one for one in held if sizes[tenant(one)] == most)


def check_number(texts: int, most: int) -> None:
    """Raise InputError for a request of more texts than are ever taken together."""
    if texts > most:
        raise InputError(
            f"The request asks for {texts} texts (prompts times n), and this server takes {most} "
            "together; ask for fewer."
        )


def share_of(places: int, share: float, client: str) -> int:
    """Places that a client may have; all where a server cannot tell clients apart."""
    return max(1, int(places * share)) if client else places
