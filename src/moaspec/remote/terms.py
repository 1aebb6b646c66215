"""What a server offers, and all that is checked about what a device asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moaspec.decode.sampling import SamplingParams
from moaspec.errors import InputError, RefusedError, WireError
from moaspec.model import MoADrafter
from moaspec.remote import identity, wire
from moaspec.remote import target_pb2 as pb
from moaspec.remote.layout import Layout
from moaspec.remote.records import Asked
from moaspec.remote.sessions import Opening
from moaspec.target import Target

if TYPE_CHECKING:
    from moaspec.decode.grammar import Grammars

MOST_LAYERS = 3
"""Largest N for drafters that were not trained for a certain one; the paper's largest."""


class Terms:
    """Checks requests against a target and a drafter.

    Args:
        target: decides.
        drafter: whose encoder runs on the server; None: there is none.
        max_tokens: longest text; None takes the target's context.
    """

    def __init__(self, target: Target, drafter: MoADrafter | None, max_tokens: int | None) -> None:
        self._target = target
        self._config = None if drafter is None else drafter.config
        self._fingerprint = "" if drafter is None else identity.fingerprint(drafter)
        self.layers = (0,) if drafter is None else _layers(drafter, target.num_layers)
        most = target.max_positions
        self.max_tokens = most if max_tokens is None else min(most, max_tokens)
        self.limits = wire.Limits(target.vocab_size, self.max_tokens)
        self._grammars: Grammars | None = None  # made when a device first asks for one

    def describe(self) -> pb.Description:
        """Who this server is and what it can do."""
        return pb.Description(
            protocol=identity.PROTOCOL,
            target=identity.to_message(self._target.identity),
            drafter=self._fingerprint,
            law=identity.LAW,
            num_target_layers=self.layers,
            max_tokens=self.max_tokens,
            max_drafted=wire.MAX_DRAFTED,
            name=self._target.name,
        )

    def opening(self, message: pb.ClientMessage) -> Opening:
        """Everything that a turn asks for, checked; its grammar is compiled later, by `ruled`.

        Raises:
            WireError: values out of range.
            RefusedError: another model, or one that this server has not.
        """
        asked = message.open
        if (asked.protocol, asked.law) != (identity.PROTOCOL, identity.LAW):
            raise RefusedError(
                f"The device speaks protocol {asked.protocol} with law {asked.law}, this server "
                f"{identity.PROTOCOL} with {identity.LAW}. Update the older one."
            )
        target = identity.from_message(asked.target)
        if wrong := identity.difference(target, self._target.identity):
            raise RefusedError(f"The device drafts for another target: {wrong}.")
        ids = self.text(asked.token_ids)
        if not 1 <= asked.prompt_length <= len(ids) or message.turn < 1:
            raise WireError("A turn has a number from 1 on, and a prompt within its text.")
        return Opening(
            turn=message.turn,
            token_ids=ids,
            prompt_length=asked.prompt_length,
            sampling=wire.sampling_of(asked.sampling, self.limits),
            grammar=asked.sampling.grammar,
            asked=self._asked(asked),
        )

    def text(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """A text that has room for another token.

        Raises:
            WireError: an empty one, one that is too long, or ids outside the vocabulary.
        """
        return wire.tokens_of(token_ids, self.limits, least=1, most=self.max_tokens - 1)

    async def ruled(
        self, sampling: SamplingParams, grammar: str, prompt_length: int
    ) -> SamplingParams:
        """Settings with their grammar as a logits processor.

        Compiling may take seconds, in which heartbeats of all devices are to be answered: so it
        happens in another thread.

        Raises:
            RefusedError: a grammar that cannot be compiled here.
        """
        if not grammar:
            return sampling
        grammars = self._known_grammars()
        try:
            processor = await asyncio.to_thread(grammars.processor, grammar, prompt_length)
        except InputError as error:
            raise RefusedError(str(error)) from error
        return replace(sampling, processors=(processor,))

    def _known_grammars(self) -> Grammars:
        try:
            from moaspec.decode.grammar import Grammars
        except ImportError as error:
            raise RefusedError(f"This server has no grammars: {error.name} is missing.") from error
        self._grammars = self._grammars or Grammars(
            self._target.tokenizer,
            vocab_size=self._target.vocab_size,
            stop_token_ids=self._target.stop_token_ids,
        )
        return self._grammars

    def _asked(self, asked: pb.Open) -> Asked | None:
        """The activations that a device wants."""
        if not asked.drafter:
            return None
        if asked.drafter != self._fingerprint or self._config is None:
            have = self._fingerprint[:12] or "none"
            raise RefusedError(
                f"The device's drafter ({asked.drafter[:12]}) is not the one whose encoder runs "
                f"here ({have}). Export the device bundle anew from the server's drafter."
            )
        if asked.num_target_layers not in self.layers:
            raise RefusedError(
                f"N={asked.num_target_layers} is not among {list(self.layers)} of this drafter."
            )
        layout = Layout.of(
            self._config,
            wire.codec_of(asked.codec),
            asked.num_target_layers,
            self._target.head_dim,
        )
        return Asked(layout, wire.runs_of(asked.held, self.limits))


def _layers(drafter: MoADrafter, num_layers: int) -> tuple[int, ...]:
    """The N that devices may ask for: those with an exit; without exits any, within reason."""
    recorded = drafter.config.num_target_layers
    if drafter.exits:
        return tuple(recorded)
    return tuple(range(min(num_layers, max(*recorded, MOST_LAYERS)) + 1))
