"""A conversation whose turns reuse the caches of target and drafter."""

from collections.abc import Generator, Sequence
from typing import Unpack

from moaspec.generation.local_engine import local_engine
from moaspec.generation.shaping import shaping_for
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.generate_options import (
    GenerateOptions,
    check_options,
    row_settings,
    token_ids,
)
from moaspec_core.engine.request_state import Event, GenerationResult


class Session:
    """Decodes turn after turn, computing only what a turn adds to the one before.

    Every turn passes the whole conversation so far, as a chat template renders it. The tokens that
    it shares with the session's text stay cached; from the first difference on, target and drafter
    are rolled back. So turns may also be edited, dropped or replaced, and the text is always the
    one of `moaspec.generate` with the same prompt, settings and seed.

    Args:
        target: the model whose text is produced.
        drafter: as for `generate`; None decodes plainly.
        num_target_layers: N, target layers that the drafter reuses. None takes the N of `generate`
            with `tree="auto"`, for all turns and all shapes.

    Raises:
        InputError: something that is no drafter, or N for a drafter that reuses no layers.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Proposer | None = None,
        *,
        num_target_layers: int | None = None,
    ) -> None:
        self.target = target
        shaping = shaping_for(target, drafter, num_target_layers=num_target_layers)
        self._drafter, self._num_target_layers = drafter, shaping.num_target_layers
        self._engine = local_engine(target, drafter, num_target_layers=self._num_target_layers)
        self._prompt: list[int] = []
        self._handle: int | None = None
        self._result = GenerationResult()
        self._events: Generator[Event] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The conversation as the session holds it: the latest turn's prompt and its answer."""
        return [*self._prompt, *self._result.token_ids]

    @property
    def result(self) -> GenerationResult:
        """Of the latest turn, finished or not; empty before the first."""
        return self._result

    def generate(
        self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> GenerationResult:
        """Answer a conversation.

        Args:
            prompt_ids: token ids of the whole conversation, earlier answers included.
            **options: see `GenerateOptions`.

        Returns:
            The result; `num_reused_tokens` says how much of the prompt was not computed again.

        Raises:
            InputError: bad prompt ids, tree sizes or numbers; the session stays as it was.
        """
        for _ in self.stream(prompt_ids, **options):
            pass
        return self._result

    def stream(
        self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generator[Event]:
        """Like `generate`, yielding verified tokens as each round ends.

        Closing the iterator, or starting another turn, ends the answer where it is; what was
        generated stays part of the session.
        """
        check_options(options, GenerateOptions)
        prompt, settings = token_ids(prompt_ids), row_settings(self.target, options)
        shaping = shaping_for(
            self.target,
            self._drafter,
            tree=options.get("tree", "auto"),
            free_branches=options.get("free_branches", "auto"),
            num_target_layers=self._num_target_layers,
        )
        self._stop()
        self._handle = self._engine.add(
            prompt,
            shape=shaping.policy(settings["sampling"]),
            free_branches=shaping.branches(settings["sampling"]),
            keep=True,
            after=self._handle,
            **settings,
        )
        self._prompt, self._result = prompt, self._engine.result(self._handle)
        self._events = self._engine.run()
        return self._events

    def reset(self) -> None:
        """Drop the conversation and its caches."""
        self._stop()
        if self._handle is not None:
            self._engine.forget(self._handle)
        self._prompt, self._handle, self._result = [], None, GenerationResult()

    def _stop(self) -> None:
        """End an answer that is still running. Its iterator may not even have been started."""
        if self._events is not None:
            self._events.close()
        self._engine.abort_all()
