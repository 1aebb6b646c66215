"""The interface between the HTTP endpoints and the decoder behind them.

`LocalSource` decodes with an engine in this process, `EdgeSource` with sessions of a remote target.
"""

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from moaspec_core.engine.engine import check_bias, check_prompt
from moaspec_core.engine.request_state import Event, Source, StopReason
from moaspec_core.errors import BusyError, InputError
from moaspec_core.sampling.generation_defaults import GenerationDefaults
from moaspec_core.sampling.grammar import Grammar, GrammarProcessor, Grammars
from moaspec_core.sampling.incremental_text import TokenBytes
from moaspec_core.sampling.params import Alternatives, SamplingParams, TextLogprobs

if TYPE_CHECKING:
    from moaspec_core.engine.device_target import DeviceTarget
    from moaspec_train.learning_process import LearningStatus

T = TypeVar("T")
TokenSource = Source | Literal["device"]
"""`Source`, or "device": kept text that a device wrote without its server."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One text to generate."""

    prompt_ids: tuple[int, ...]  # at least one token id
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    sampling: SamplingParams
    grammar: Grammar | None = None  # grammar of the text; None allows any text
    ignore_eos: bool = False  # whether tokens that end a text do not end this one
    speculation: bool = True  # whether to draft; False decodes plainly
    provisional: bool = False  # whether to report text that is not verified yet
    tenant: str = ""  # owner of the request; tenants share no caches
    client: str = ""  # key whose share of the server it uses; "" if there are not several keys
    request: str = ""  # its request, which takes turns of its own if there are not several keys
    priority: int = 0  # among the jobs of one owner the lowest comes first
    scored: bool = False  # whether log-probabilities of the prompt are wanted too

    @property
    def owner(self) -> str:
        """Who takes turns with others."""
        return f"key {self.client}" if self.client else f"request {self.request}"

    @property
    def owner_label(self) -> str:
        """Name of the owner in metrics, which never grows with the number of requests."""
        return self.client or "requests"

    @property
    def processors(self) -> tuple[GrammarProcessor, ...]:
        """The grammar as a logits processor."""
        return () if self.grammar is None else (self.grammar.processor(len(self.prompt_ids)),)


@dataclass(frozen=True, kw_only=True)
class Update:
    """New tokens of one text since the previous update."""

    token_ids: tuple[int, ...] = ()  # final tokens: verified, or kept ones with source "device"
    sources: tuple[TokenSource, ...] = ()  # proposer of each token
    # logprobs, top_logprobs: log-probabilities of each token, if the job requests them.
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    # The verification that gave the tokens; None for the prompt's first token.
    round: Event | None = None
    provisional: tuple[int, ...] = ()  # all unverified tokens after the final text
    stop_reason: StopReason | None = None  # set on the last update
    num_reused_tokens: int = 0  # prompt tokens found in a cache
    scores: TextLogprobs | None = None  # of the prompt, with its first token, if wanted


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """The link to a remote target; also its JSON form in docs/serve.md."""

    state: Literal["up", "down", "syncing"]  # state of the latest session
    round_trip_s: float | None = None  # latest measured round trip; None if unknown
    # Expected speed with drafts, relative to the server's streaming alone; None if unknown.
    draft_gain: float | None = None
    # bytes_sent, bytes_received: totals since the start.
    bytes_sent: int = 0
    bytes_received: int = 0
    can_cut: bool = False  # whether the link is emulated and can be cut
    cut: bool = False  # whether it is cut now


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Properties of the model behind a source."""

    name: str  # model name in responses
    mode: Literal["local", "edge"]  # see `docs/serve.md`
    target: "DeviceTarget"  # the target, or a device's part of it
    defaults: GenerationDefaults  # sampling defaults for fields that a request does not set
    speculates: bool  # whether there is a drafter
    places: int  # texts that are decoded or wait, at most
    fingerprint: str  # changes when the same seed may give another text

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    @cached_property
    def grammars(self) -> Grammars:
        target = self.target
        return Grammars(
            target.tokenizer, vocab_size=target.vocab_size, stop_token_ids=target.stop_token_ids
        )

    def check(self, job: Job) -> None:
        """Raise `InputError` for token ids or settings that the target cannot take."""
        check_prompt(job.prompt_ids, self.target.vocab_size, self.target.max_positions)
        check_bias(job.sampling, self.target.vocab_size)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        return max(len(token) for token in self.tokenizer.get_vocab())


@dataclass(frozen=True)
class Load:
    """Number of texts in decoding, and of texts that wait."""

    active: int = 0
    waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class OwnerWork:
    """What one owner has and had: a key, or all requests without a key of their own."""

    active: int = 0  # texts in decoding
    waiting: int = 0  # texts that wait for a place
    read_tokens: int = 0  # of prompts, and of texts that were set back; since the start
    written_tokens: int = 0  # since the start
    cache_bytes: int = 0  # keys and values, those of ended texts included that are kept


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Totals of all steps since the start, and the work of each owner."""

    steps: int
    seconds: float
    long_steps: int  # longer than `STEP_S`
    rows_set_back: int
    owners: Mapping[str, OwnerWork]


Report = Callable[[int, Update | Exception], None]
"""(index of a job, its next update or the error that ended it). Called on the event loop."""

Cancel = Callable[[], Awaitable[object]]
"""Cancels the unfinished jobs of one request. May be called more than once."""


class TextSource(Protocol):
    """Decodes many jobs concurrently."""

    info: SourceInfo

    async def start(self) -> None:
        """Start decoding on the running event loop."""
        ...

    async def close(self) -> None:
        """End all jobs with `ServerError` and free everything."""
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
    def load(self) -> Load: ...

    async def score(self, jobs: Sequence[Job]) -> list[TextLogprobs]:
        """Log-probabilities of each job's prompt, with the job's number of alternatives.

        Raises:
            InputError: a job is invalid, or the target is elsewhere.
            BusyError: the source is full.
        """
        del jobs
        raise InputError(
            "echo with logprobs needs the target in this process (moaspec serve); a device has it "
            "not. Leave one of them out."
        )

    @property
    def steps(self) -> StepCounts | None:
        """What the scheduler did; None if decoding is not scheduled here."""
        return None

    @property
    def learning(self) -> "LearningStatus | None":
        """How the drafter learns; None if it does not."""
        return None

    @property
    def link(self) -> LinkState | None:
        """The link to a remote target; None if the target is local."""
        return None

    def cut(self, cut: bool) -> bool:  # noqa: ARG002
        """Cut or restore an emulated link; returns False if there is none."""
        return False


def entry_to_evict(
    entries: Sequence[T], tenant: Callable[[T], str], size: Callable[[T], int] = lambda _: 1
) -> T:
    """The oldest entry of the tenant whose entries are largest in total.

    `entries` has the oldest first; the two functions return an entry's owner and its size.
    """
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[tenant(entry)] += size(entry)
    largest = max(sizes.values())
    return next(entry for entry in entries if sizes[tenant(entry)] == largest)


@dataclass(frozen=True, kw_only=True)
class SourceLimits:
    """Limits of a source."""

    active: int  # maximum number of texts decoded together
    waiting: int  # maximum number of texts that wait; further texts are refused

    @property
    def places(self) -> int:
        """Maximum number of texts in all."""
        return self.active + self.waiting


class Places:
    """The places of a source: counts the texts of each client and refuses those beyond limits.

    Messages call the source `where`: "server" or "device".

    Args:
        wait_s: seconds until so many texts of a client, or of all for "", have probably ended.
    """

    def __init__(
        self,
        where: str,
        limits: SourceLimits,
        wait_s: Callable[[str, int], float],
    ) -> None:
        self._where, self._total, self._wait_s = where, limits.places, wait_s
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._taken.total()

    def take(self, client: str, num_texts: int) -> None:
        """Take places for all texts of a request, or for none.

        Raises:
            InputError: the request has more texts than a client may ever have.
            BusyError: there are not enough free places now.
        """
        share = client_share(self._total, client)
        if num_texts > share:
            raise InputError(
                f"The request asks for {num_texts} texts (prompts times n), and this server takes "
                f"{share} together; ask for fewer."
            )
        with self._lock:
            own = self._taken[client]
            found = (
                (
                    self.taken,
                    self._total,
                    "",
                    f"The {self._where} has {{}} requests, and takes {{}} "
                    "(--max-active and --max-waiting).",
                ),
                (own, share, client, "This key has {} requests here, and may have {}."),
            )
            for taken, most, whose, message in found:
                if taken + num_texts > most:
                    retry_s = self._wait_s(whose, taken + num_texts - most)
                    raise BusyError(
                        f"{message.format(taken, most)} Try again in {ceil(retry_s)} s.", retry_s
                    )
            self._taken[client] = own + num_texts

    def free(self, client: str) -> None:
        with self._lock:
            self._taken[client] -= 1
            self._taken += Counter()  # drops clients without texts


class RecentMean:
    """A mean in which newer values weigh more; 0 before the first one."""

    WEIGHT = 0.1

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value += (value - self.value) * (self.WEIGHT if self.value else 1.0)


class AnswerLength(RecentMean):
    """The mean number of tokens of answers."""

    def tokens_left(self, written: int, most: int, *, endless: bool) -> float:
        """Tokens that an answer probably still gets, at least one.

        Args:
            most: its limit.
            endless: whether no token ends it before.
        """
        left = float(most - written)
        if self.value and not endless:
            # What is longer than others probably goes on for as long again.
            left = min(left, max(self.value - written, written if written >= self.value else 0))
        return max(1.0, left)


def client_share(places: int, client: str) -> int:
    """Number of places that a client may use: half, or all if clients are not told apart."""
    return max(1, places // 2) if client else places
