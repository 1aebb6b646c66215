"""`moaspec chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

from moaspec.cli.chat_url import ServerChat
from moaspec.cli.generate import describe
from moaspec.cli.loading import load, measure_once
from moaspec_core.cli import options
from moaspec_core.cli.model_defaults import with_model_defaults
from moaspec_core.cli.prompts import conversation_ids, read_as_utf8
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.chat_loop import ChatLoop
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.cli.terminal.token_printer import TokenPrinter, show_events
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec.generation.session import Session
    from moaspec_core.engine.generate_options import GenerateOptions
    from moaspec_core.engine.request_state import GenerationResult


@options.with_options
def chat(
    *,
    asked: options.LoadOptions,
    url: Annotated[
        str | None, "Chat with this server (`moaspec serve`, `moaspec edge`) instead."
    ] = None,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 512,
    decoding: options.DecodingOptions,
) -> None:
    """Hold a conversation at the terminal.

    Accepted drafts are green; /help lists what else can be typed. Every answer computes only what
    is new in the conversation. Reads lines from standard input, so
    questions may also be piped in. With --url the server's model answers, with its own drafts.

    Example: moaspec chat --system "Answer briefly." --temperature 0.7
    """
    settings = decoding.settings(max_new_tokens)
    if url is not None:
        if asked != options.LoadOptions() or not decoding.only_samples:
            raise InputError(
                "Options of loading and drafting are for a target here; with --url they are the "
                "server's. Leave all out but those of sampling, --system and --max-new-tokens."
            )
        _hold(ServerChat(url, settings, system))
        return
    target, module = load(asked)
    if decoding.tree == "auto":
        measure_once(target, module)
    from moaspec.generation.session import Session

    chat_loop = LocalChat(Session(target, module), with_model_defaults(settings, target), system)
    chat_loop.prompt_ids("?")  # a target that cannot hold conversations should say so at once
    _hold(chat_loop)


def _hold(chat_loop: ChatLoop) -> None:
    if not sys.stdin.isatty():
        read_as_utf8(sys.stdin)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - its import gives `input` line editing and history
    console.err.print("Ask something, or type /help.", style="dim")
    try:
        while chat_loop.turn():
            pass
    finally:
        chat_loop.close()


class LocalChat(ChatLoop):
    """A conversation that a session in this process answers."""

    def __init__(
        self, session: Session, settings: GenerateOptions, system: str | None = None
    ) -> None:
        super().__init__(settings, system)
        self.session = session
        self.results: list[GenerationResult] = []

    def prompt_ids(self, question: str) -> list[int]:
        """The whole conversation with this question."""
        return conversation_ids(self.session.target, self.conversation(question))

    def answer(self, question: str) -> None:
        printer = TokenPrinter(self.session.target)
        events = self.session.stream(self.prompt_ids(question), **self.settings)
        with deferred_interrupts() as interrupts:
            show_events(events, printer, interrupts)
        result = self.session.result
        tokenizer: Any = self.session.target.tokenizer
        if result.token_ids:
            self.add_turn(question, tokenizer.decode(result.token_ids, skip_special_tokens=True))
            self.results.append(result)

    def stats(self) -> str:
        if not self.results:
            raise InputError("Nothing has been answered yet.")
        last = self.results[-1]
        tokens = sum(len(result.token_ids) for result in self.results)
        rounds = sum(result.num_rounds for result in self.results)
        emitted = sum(sum(result.accept_lengths) for result in self.results)
        tau = f", tau {emitted / rounds:.2f}" if rounds else ""
        return (
            f"last answer: {describe(last)}, {last.num_reused_tokens} tokens reused\n"
            f"conversation: {len(self.results)} answers, {tokens} tokens{tau}"
        )

    def forget(self) -> None:
        self.session.reset()
        self.results = []
