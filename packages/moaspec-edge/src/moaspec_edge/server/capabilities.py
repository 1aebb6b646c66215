"""A server's description of itself, and the checks of device requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec.model.moa import MoADrafter
from moaspec.target.spec import TargetSpec
from moaspec_core.errors import InputError, RefusedError, WireError
from moaspec_core.sampling.params import SamplingParams
from moaspec_core.support import limits
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.activation_layout import ActivationLayout
from moaspec_edge.server.activation_records import RecordRequest
from moaspec_edge.server.server_session import TurnRequest

if TYPE_CHECKING:
    from moaspec_core.sampling.grammar import Grammars

MAX_LAYERS = 3
"""Largest N for drafters that were not trained for a certain one; the paper's largest."""


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """Properties of the inference engine, which devices are told."""

    name: str = "torch"
    # Drafted tokens that it verifies in one round; more are cut.
    max_drafted: int = limits.MAX_DRAFTED
    chains_only: bool = False  # it verifies only the chain of first children of a tree


class Capabilities:
    """Checks requests against a target and a drafter.

    Args:
        drafter: its encoder runs on the server; None for no drafter.
        engine: properties of the engine that runs the target.
    """

    def __init__(
        self,
        target: TargetSpec,
        drafter: MoADrafter | None,
        max_tokens: int,
        engine: EngineCapabilities,
    ) -> None:
        self._target, self._engine = target, engine
        self._config = None if drafter is None else drafter.config
        self._fingerprint = "" if drafter is None else fingerprint(drafter)
        self._versions = {self._fingerprint} - {""}  # with the same encoder
        self.newest = ""  # fingerprint of the version that is announced
        self.layers = (
            (0,) if drafter is None else layers_offered(drafter, target.num_reusable_layers)
        )
        self.max_tokens = max_tokens
        self.limits = wire.WireLimits(target.vocab_size, self.max_tokens)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._grammars: Grammars | None = None  # made when a device first asks for one

    def add_versions(self, *fingerprints: str) -> None:
        """Accept bundles of these versions of the drafter, too; the last one is announced."""
        self._versions.update(fingerprints)
        self.newest = fingerprints[-1] if fingerprints else ""

    def serves(self, drafter: str) -> bool:
        """Whether the encoder that runs here belongs to this drafter of a device."""
        return drafter in self._versions

    def describe(self) -> pb.Description:
        return pb.Description(
            protocol=identity.PROTOCOL,
            target=identity.to_message(self._target.identity),
            drafter=self._fingerprint,
            sampling_version=identity.SAMPLING_VERSION,
            num_target_layers=self.layers,
            max_tokens=self.max_tokens,
            max_drafted=self._engine.max_drafted,
            name=self._target.name,
            engine=self._engine.name,
            chains_only=self._engine.chains_only,
            newest=self.newest,
        )

    def opening(self, message: pb.ClientMessage) -> TurnRequest:
        """Check a request for a turn; `with_grammar` compiles its grammar later.

        Raises:
            WireError: values out of range.
            RefusedError: another target, drafter or protocol than the server's.
        """
        asked = message.open
        versions = asked.protocol, asked.sampling_version
        if versions != (identity.PROTOCOL, identity.SAMPLING_VERSION):
            raise RefusedError(
                f"The device speaks protocol {versions[0]} with sampling {versions[1]}, this "
                f"server {identity.PROTOCOL} with {identity.SAMPLING_VERSION}. Update the older."
            )
        target = identity.from_message(asked.target)
        if wrong := identity.difference(target, self._target.identity):
            raise RefusedError(f"The device drafts for another target: {wrong}.")
        ids = self.text(asked.token_ids)
        if not 1 <= asked.prompt_length <= len(ids) or message.turn < 1:
            raise WireError("A turn has a number from 1 on, and a prompt within its text.")
        return TurnRequest(
            turn=message.turn,
            token_ids=ids,
            prompt_length=asked.prompt_length,
            sampling=wire.sampling_of(asked.sampling, self.limits),
            grammar=asked.sampling.grammar,
            asked=self._asked(asked),
        )

    def text(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Check a text, which must leave room for another token; WireError as `tokens_of`."""
        return wire.tokens_of(token_ids, self.limits, least=1, most=self.max_tokens - 1)

    async def with_grammar(
        self, sampling: SamplingParams, grammar: str, prompt_length: int, owner: str
    ) -> SamplingParams:
        """Add a grammar to sampling parameters, as a logits processor.

        Compiling may take seconds, so it runs in another thread while heartbeats are answered. Each
        owner's grammars are compiled one after another.

        Raises:
            RefusedError: the grammar cannot be compiled.
        """
        if not grammar:
            return sampling
        grammars = self._known_grammars()
        turn = self._turns.setdefault(owner, asyncio.Lock())
        try:
            async with turn:
                compiled = await asyncio.to_thread(grammars.compiled, grammar)
        except InputError as error:
            raise RefusedError(str(error)) from error
        return replace(sampling, processors=(compiled.processor(prompt_length),))

    async def prepare_grammars(self) -> None:
        """See `Grammars.prepare`; without effect if this server has no grammars."""
        with contextlib.suppress(RefusedError):
            await asyncio.to_thread(self._known_grammars().prepare)

    def _known_grammars(self) -> Grammars:
        try:
            from moaspec_core.sampling.grammar import Grammars
        except ImportError as error:
            raise RefusedError(f"This server has no grammars: {error.name} is missing.") from error
        self._grammars = self._grammars or Grammars(
            self._target.tokenizer,
            vocab_size=self._target.vocab_size,
            stop_token_ids=self._target.stop_token_ids,
        )
        return self._grammars

    def _asked(self, asked: pb.Open) -> RecordRequest | None:
        """Check which activations the device asks for."""
        if not asked.drafter:
            return None
        if not self.serves(asked.drafter) or self._config is None:
            have = self._fingerprint[:12] or "none"
            raise RefusedError(
                f"The device's drafter ({asked.drafter[:12]}) is not the one whose encoder runs "
                f"here ({have}). Export the device bundle anew from the server's drafter."
            )
        if asked.num_target_layers not in self.layers:
            raise RefusedError(
                f"N={asked.num_target_layers} is not among {list(self.layers)} of this drafter."
            )
        layout = ActivationLayout.of(
            self._config,
            wire.codec_of(asked.codec),
            asked.num_target_layers,
            self._target.head_dim,
        )
        return RecordRequest(layout, wire.runs_of(asked.held, self.limits))


def layers_offered(drafter: MoADrafter, num_layers: int) -> tuple[int, ...]:
    """The N that devices may ask for: those with an exit; without exits any, within reason."""
    recorded = drafter.config.num_target_layers
    if drafter.exits:
        return tuple(recorded)
    return tuple(range(min(num_layers, max(*recorded, MAX_LAYERS)) + 1))
