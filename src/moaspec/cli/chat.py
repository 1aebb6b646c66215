"""`moaspec chat`."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from moaspec.cli import console, options
from moaspec.cli.generate import choose_drafter, describe
from moaspec.decode import GenerationResult, RowOptions, Session, sampling_params
from moaspec.errors import InputError
from moaspec.target import load_target

HELP = """\
/stats        speed and acceptance of the last answer and of the conversation
/seed N       sample with this seed from now on; without N, draw one for each answer
/system TEXT  replace the system prompt; without TEXT, have none
/reset        forget the conversation
/help         this list
/exit         leave (so does Ctrl-D); Ctrl-C stops an answer and keeps what it said"""


def chat(
    model: options.Model = options.MODEL,
    drafter: options.DrafterName = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    tree: options.Shape = "auto",
    free_branches: options.FreeBranches = options.FreeBranchesOption.auto,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    speculation: options.Speculation = True,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
) -> None:
    """Hold a conversation; accepted drafts are green, and /help lists what else can be typed.

    Every answer computes only what is new in the conversation. Reads lines from standard input, so
    questions may also be piped in.

    Example: moaspec chat --system "Answer briefly." --temperature 0.7
    """
    settings = options.row_options(locals())
    console.set_threads(threads)
    console.quiet_libraries()
    with console.err.status(f"Loading {model}"):
        target = load_target(model, dtype=dtype)
        module = choose_drafter(drafter, model, target) if speculation else None
    talk = Conversation(Session(target, module), settings, system)
    talk.prompt_ids("?")  # a target that cannot hold conversations should say so at once
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - its import gives `input` line editing and history
    console.err.print("Ask something, or type /help.", style="dim")
    while talk.turn():
        pass


class Conversation:
    """Messages so far, and what the user may type.

    Args:
        session: answers.
        settings: of every answer.
        system: the system prompt, or None.
    """

    def __init__(self, session: Session, settings: RowOptions, system: str | None = None) -> None:
        self.session, self.settings, self.system = session, settings, system
        self.messages: list[dict[str, str]] = []
        self.results: list[GenerationResult] = []
        self._commands = {
            "/stats": self._stats,
            "/seed": self._seed,
            "/system": self._system,
            "/reset": self._reset,
            "/help": lambda _: console.out.print(HELP, markup=False),
        }

    def turn(self) -> bool:
        """Read a line and do what it says; False when the user leaves."""
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return False
        except KeyboardInterrupt:
            console.err.print("\nCtrl-D or /exit leaves.", style="dim")
            return True
        if line == "/exit":
            return False
        try:
            self._do(line)
        except InputError as error:
            console.error(str(error))
        return True

    def prompt_ids(self, question: str) -> list[int]:
        """The whole conversation with this question."""
        messages = [*self.messages, {"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return console.conversation_ids(self.session.target, messages)

    def _do(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name in self._commands:
            self._commands[name](argument.strip())
        elif name.startswith("/"):
            raise InputError(f"Unknown command {name}; /help lists them.")
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        printer = console.TokenPrinter(self.session.target)
        events = self.session.stream(self.prompt_ids(question), **self.settings)
        console.show_events(events, printer)
        printer.close()
        result, tokenizer = self.session.result, self.session.target.tokenizer
        if result.token_ids:
            decode: Any = getattr(tokenizer, "decode", None)
            answer = decode(result.token_ids, skip_special_tokens=True)
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer})
            self.results.append(result)

    def _stats(self, _: str) -> None:
        if not self.results:
            raise InputError("Nothing has been answered yet.")
        last = self.results[-1]
        console.out.print(f"last answer: {describe(last)}, {last.num_reused_tokens} tokens reused")
        tokens = sum(len(result.token_ids) for result in self.results)
        rounds = sum(result.num_rounds for result in self.results)
        emitted = sum(sum(result.accept_lengths) for result in self.results)
        tau = f", tau {emitted / rounds:.2f}" if rounds else ""
        console.out.print(f"conversation: {len(self.results)} answers, {tokens} tokens{tau}")

    def _seed(self, argument: str) -> None:
        try:
            seed = int(argument) if argument else None
        except ValueError:
            raise InputError(f"/seed takes an integer, got {argument!r}.") from None
        sampling_params({**self.settings, "seed": seed})
        self.settings["seed"] = seed
        console.out.print("a seed is drawn for each answer" if seed is None else f"seed {seed}")

    def _system(self, argument: str) -> None:
        self.system = argument or None
        console.out.print("system prompt set" if argument else "no system prompt")

    def _reset(self, _: str) -> None:
        self.session.reset()
        self.messages, self.results = [], []
        console.out.print("conversation forgotten")
