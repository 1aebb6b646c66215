"""The device's session: drafts on the device, verifies on a server."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.generate_options import (
    GenerateOptions,
    check_options,
    row_settings,
    token_ids,
)
from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.engine.request_state import Event, GenerationResult, Source
from moaspec_core.errors import InputError, LinkError
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.stop_strings import StopStrings, stop_strings
from moaspec_core.sampling.token_ids import common_length
from moaspec_core.support import limits
from moaspec_core.support.tasks import end_tasks
from moaspec_edge.device.device_parts import Device, DeviceProposer
from moaspec_edge.device.draft_ahead import AheadDrafter
from moaspec_edge.device.events import LinkStats, RemoteEvent, now
from moaspec_edge.device.link import ServerLink
from moaspec_edge.device.link_policy import LinkPolicy
from moaspec_edge.device.prefix_cache import DeviceActivations, PrefixStore
from moaspec_edge.device.remote_verifier import PendingRequest, RemoteVerifier
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.codec import CODECS, CodecName
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import Transport

MIN_RECEIVED_SHARE = 0.75
"""Share of a text whose activations a device must hold to continue it without a link."""

OnCut = Literal["rollback", "keep", "wait"]


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How a session uses its link; see docs/remote.md.

    Attributes:
        codec: of activations: "fp16", "int8" or "int4".
        num_target_layers: N; None takes the drafter's default.
        draft: a shape, or "auto" for the fastest chain on this link.
        draft_ahead: draft while waiting for a verdict.
        on_cut: treatment of tokens that are drafted without a link: "rollback" replaces tokens
            that the target does not choose, "keep" leaves them (with a grammar it drafts none),
            "wait" drafts none.
        max_provisional: largest number of tokens drafted in one cut of the link.
        retry_s: seconds after which a request is sent again, in case it or its answer was lost; or
            four round trips and four passes of the server, if these take longer.
        tenant, prefix_dir: directory that keeps activations of prompts for later sessions, separate
            for each tenant, which is any name; without a directory they are not kept.
        give_up_s: time without a verdict after which a turn fails, with or without a link; None for
            no limit.

    Raises:
        InputError: an invalid value.
    """

    codec: CodecName = "int8"
    num_target_layers: int | None = None
    draft: Tree | str = "auto"
    draft_ahead: bool = True
    on_cut: OnCut = "rollback"
    max_provisional: int = 256
    retry_s: float = 0.5
    tenant: str = ""
    prefix_dir: Path | None = None
    give_up_s: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("codec", CODECS), ("on_cut", ("rollback", "keep", "wait"))):
            if getattr(self, name) not in known:
                raise InputError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )
        if isinstance(self.draft, str):
            parse_shape(self.draft)
        if not 0 <= self.max_provisional <= limits.MAX_DRAFTED:
            raise InputError(
                f"max_provisional must be within 0..{limits.MAX_DRAFTED}, got "
                f"{self.max_provisional}."
            )


class RemoteSession:
    """Decodes turns with a target on a server.

    As in `moaspec.Session`, every turn passes the whole conversation so far; the prefix that it
    shares with the last turn is neither computed nor sent again. One turn at a time.

    Args:
        device: the drafting side.
        transport: connects to the server; a `Fleet` to one of several, or to another that works.

    Attributes:
        stats: of the link.
    """

    def __init__(
        self, device: Device, transport: Transport, options: RemoteOptions | None = None
    ) -> None:
        self.device, self.options = device, options or RemoteOptions()
        self.stats = LinkStats()
        self._rules = PositionRules.of(device.target)
        self._drafting = drafting = device.drafting(self.options.num_target_layers)
        inner = drafting if isinstance(drafting, DeviceProposer) else None
        self._ahead = AheadDrafter(drafting, needs_memory=inner is not None, clock=now)
        self._memory = None if inner is None else self._make_memory(inner)
        self._chains_only = inner is not None and inner.chains_only
        self._verifier = RemoteVerifier(
            self._ahead,
            target=device.target,
            opening=self._opening(0 if inner is None else inner.num_target_layers),
            memory=self._memory,
            meanwhile=self._meanwhile,
            num_streamed=self._num_streamed,
            observe=self._observe,
            keep=self.options.on_cut == "keep",
            retry_s=self.options.retry_s,
        )
        self._route = Fleet.of(transport).route()
        self._link = ServerLink(
            self._route,
            secrets.token_bytes(wire.SESSION_BYTES),
            self.stats,
            on_message=self._verifier.receive,
            on_connect=self._verifier.connected,
            on_change=self._verifier.wake,
        )
        self._verifier.link = self._link
        self._auto = LinkPolicy(
            wait_s=lambda: self.stats.wait_s,
            step_s=lambda: self._ahead.step_s,
            plain_s=self._plain_s,
            measuring=lambda: self._ahead.is_measuring,
            counts=lambda: self._verifier.counts,
            ahead=self.options.draft_ahead,
        )
        self._engine = Engine(self._verifier, self._ahead, target=device.target)
        self._events: asyncio.Queue[RemoteEvent | None] = asyncio.Queue()
        self._handle: int | None = None
        self._result = GenerationResult()
        self._task: asyncio.Task[None] | None = None
        self._stop: StopStrings | None = None
        self._auto_drafts = self._writes_alone = self._ended_alone = False

    def _make_memory(self, drafting: DeviceProposer) -> DeviceActivations:
        layout = drafting.layout(self.options.codec)
        store = None
        if self.options.prefix_dir is not None:
            models = (
                self.device.target.identity,
                self.device.fingerprint,
                self.options.codec,
                drafting.num_target_layers,
            )
            store = PrefixStore(
                self.options.prefix_dir,
                self.options.tenant,
                models=repr(models),
                token_bytes=layout.token_bytes,
            )
        return DeviceActivations(layout, self._ahead, self._rules, store)

    def _opening(self, num_target_layers: int) -> pb.Open:
        """The fields that all messages that open a turn share."""
        return pb.Open(
            protocol=identity.PROTOCOL,
            sampling_version=identity.SAMPLING_VERSION,
            target=identity.to_message(self.device.target.identity),
            drafter=self.device.fingerprint or "",
            codec=wire.CODEC_NUMBERS[self.options.codec],
            num_target_layers=num_target_layers,
        )

    @property
    def result(self) -> GenerationResult:
        """Result of the latest turn so far: verified tokens, and kept ones with "keep"."""
        return self._result

    @property
    def provisional(self) -> list[int]:
        """Tokens after those of `result` that were shown but are not verified yet."""
        return list(self._verifier.provisional)

    async def generate(
        self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> GenerationResult:
        """Answer a conversation; see `stream`."""
        async for _ in self.stream(prompt_ids, **options):
            pass
        return self._result

    async def stream(
        self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RemoteEvent]:
        """Answer a conversation; yields tokens as they are verified, or drafted without a link.

        Args:
            prompt_ids: token ids of the whole conversation.
            **options: see `GenerateOptions`; `logits_processors` cannot be sent. `tree` overrides
                `RemoteOptions.draft`.

        Raises:
            InputError: invalid prompt ids, tree sizes or numbers.
            RefusedError: the server refuses; the message says why.
            LinkError: no verdict within `give_up_s`.
        """
        await self._end_turn()
        self._begin(prompt_ids, options)
        events = self._events
        task = self._task = asyncio.create_task(self._decode())
        try:
            while (event := await events.get()) is not None:
                yield event
            if not task.cancelled():  # by the next turn
                await task
        finally:
            await self._end(task)
            if self._task is None and self._memory is not None:
                self._memory.save(self._verifier.text, len(self._prompt))

    @property
    def draft_gain(self) -> float | None:
        """Expected speed with drafts on this link, relative to the server's streaming alone.

        None until both are measured.
        """
        return self._auto.gain

    async def close(self) -> None:
        """End the session here and on the server."""
        await self._end_turn()
        self._link.send(pb.ClientMessage(turn=self._verifier.turn, close=pb.Close()))
        await self._link.close()

    def _begin(self, prompt_ids: Sequence[int], options: GenerateOptions) -> None:
        check_options(options, GenerateOptions)
        prompt, settings = token_ids(prompt_ids), row_settings(self.device.target, options)
        wire.sampling_message(settings["sampling"])
        tree = options.get("tree", self.options.draft)
        shaping = DraftSettings(tree, options.get("free_branches", "auto"))
        policy = self._auto if tree == "auto" else shaping.policy()
        if self._chains_only and isinstance(policy, Tree) and policy.breadth > 1:
            raise InputError(f"This device drafts chains, no {policy}; use auto or chain:LENGTH.")
        self.device.renew(self._drafting)
        branches = shaping.branches()
        self._auto_drafts = policy is self._auto and branches is None
        self._verifier.never_drafts = policy is None and branches is None
        self._handle = self._engine.add(
            prompt,
            shape=policy,
            free_branches=branches,
            keep=True,
            after=self._handle,
            **settings,
        )
        self._result = self._engine.result(self._handle)
        self._events = asyncio.Queue()
        self._ended_alone = False
        self._verifier.provisional = []
        self._strings = stop_strings(options.get("stop", ()))
        self._prompt, self._started_s = prompt, now()
        # Kept tokens are not verified, so a grammar would not hold for them.
        keeps_any = not settings["sampling"].processors or self.options.on_cut != "keep"
        self._writes_alone = keeps_any and self.options.on_cut != "wait"
        self.stats.first_token_s = None
        most = len(prompt) + settings["max_new_tokens"]
        self._ahead.begin(
            end=most,
            stops=frozenset(settings["stop_token_ids"]),
            rules=self._rules,
        )
        if self._memory is not None:
            self._memory.restore(prompt)
        self._route.aim(prompt)
        self._link.start()

    def _num_streamed(self) -> int:
        """Rounds without drafts that will follow one without drafts."""
        if self._auto_drafts:
            return self._auto.pause
        return limits.MAX_STREAMED if self._verifier.never_drafts else 0

    def _observe(self, is_right: bool) -> None:
        if self._auto_drafts:
            self._auto.observe(is_right)

    def _plain_s(self) -> float | None:
        """Current time of a token without drafts, which most servers stream."""
        return self.stats.pass_s if self._verifier.max_streamed else self.stats.wait_s

    async def _decode(self) -> None:
        try:
            while self._engine.num_active:
                for event in await self._engine.astep():
                    self._events.put_nowait(self._verified(event))
        finally:
            self._engine.abort_all()
            self._verifier.halt()
            self._events.put_nowait(None)

    async def _end_turn(self) -> None:
        """End the current turn, if there is one."""
        while self._task is not None:
            await self._end(self._task)

    async def _end(self, task: asyncio.Task[None]) -> None:
        """End one turn; the next one may have begun."""
        if not task.done():
            await end_tasks(task)
        if self._task is task:
            self._task = None

    def _verified(self, event: Event) -> RemoteEvent:
        """Make the event of a round: its tokens, and the provisional tokens that remain."""
        start = len(self._result.token_ids) - len(event.token_ids)
        guessed, tokens = self._verifier.provisional, list(event.token_ids)
        same = common_length(guessed, tokens)
        rest = guessed[len(tokens) :] if same == len(tokens) and event.stop_reason is None else []
        self._verifier.provisional = rest
        # The target did not confirm the end, so the next cut may continue the text.
        self._ended_alone = self._ended_alone and bool(rest)
        if self.stats.first_token_s is None and tokens:
            self.stats.first_token_s = now() - self._started_s
        corrected = len(guessed) - same - len(rest)
        self.stats.corrected += corrected
        drafts: list[Source] = ["draft"] * len(rest)
        return RemoteEvent(
            start=start,
            token_ids=(*tokens, *rest),
            sources=(*event.sources, *drafts),
            num_provisional=len(rest),
            num_corrected=corrected,
            link=self.stats.state,
            stop_reason=event.stop_reason,
            verified=event,
        )

    def _meanwhile(self, pending: PendingRequest) -> bool:
        """Draft one step while a verdict is awaited; returns whether to draft another at once."""
        self._give_up(pending)
        if self.stats.state == "up":
            return self._draft_ahead(pending)
        alone = self.stats.state == "down" and self._writes_alone
        if pending.kept and self._link.connected:
            return False  # the kept text is being sent to the server
        return alone and self._has_enough_activations() and self._draft_alone()

    def _has_enough_activations(self) -> bool:
        """Whether the device has enough activations of the text to draft from."""
        if self._memory is None:
            return True
        return len(self._ahead.received) >= MIN_RECEIVED_SHARE * (len(self._verifier.text) - 1)

    def _draft_ahead(self, pending: PendingRequest) -> bool:
        """Draft ahead, at most to the end of the next round's drafts."""
        own = max(pending.tree.depths, default=0)
        if self._auto_drafts and not own:
            # Of a prompt that is being opened the activations are missing.
            observes = self._auto.observes and not pending.opening
            return observes and not self._ahead.ready() and self._ahead.extend()
        never = self._verifier.never_drafts or not self.options.draft_ahead
        if never or len(self._ahead.ready()) < own:
            return False
        return len(self._ahead.ready()) <= 2 * own and self._ahead.extend()

    def _draft_alone(self) -> bool:
        """Show one provisional token; drafts that were sent to the server come first."""
        if self._ended_alone or len(self._verifier.provisional) >= self.options.max_provisional:
            return False
        shown = len(self._verifier.provisional)
        if len(self._ahead.ready()) <= shown and not self._ahead.extend():
            self._end_alone()
            return False
        token = self._ahead.ready()[shown]
        self._verifier.provisional.append(token)
        self.stats.provisional += 1
        self._events.put_nowait(
            RemoteEvent(
                start=len(self._result.token_ids) + shown,
                token_ids=(token,),
                sources=("draft",),
                num_provisional=1,
                link=self.stats.state,
            )
        )
        if self._alone_stops(token):
            self._end_alone()
        return not self._ended_alone

    def _alone_stops(self, token: int) -> bool:
        """Whether a provisional token ends the text."""
        if token in self._ahead.stops:
            return True
        if self._strings and len(self._verifier.provisional) == 1:
            self._stop = StopStrings(self._strings, self.device.target.tokenizer, self._prompt)
            for earlier in self._result.token_ids:
                self._stop.push(earlier)
        return bool(self._strings and self._stop and self._stop.push(token))

    def _end_alone(self) -> None:
        """Stop provisional tokens at the end of the text; with "keep", end the turn."""
        self._ended_alone = True
        if self.options.on_cut == "keep" and self._verifier.provisional:
            self._verifier.settle()

    def _give_up(self, pending: PendingRequest) -> None:
        limit = self.options.give_up_s
        if limit is not None and now() - pending.first_s > limit:
            is_up = self.stats.state == "up"
            server, fault = self._link.server, self._link.fault.rstrip(".")
            if is_up:
                raise LinkError(f"No verified token from {server} for {limit:g} s.")
            why = f" ({fault})" if fault else ""
            raise LinkError(f"No link to {server} for {limit:g} s{why}.")
