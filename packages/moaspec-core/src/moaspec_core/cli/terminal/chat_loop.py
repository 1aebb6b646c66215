"""The loop of a conversation at the terminal, and its slash commands."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from moaspec_core.cli.terminal import console
from moaspec_core.errors import InputError, ServerError

if TYPE_CHECKING:
    from moaspec_core.engine.generate_options import GenerateOptions

HELP = """\
/stats        speed and acceptance of the last answer and of the conversation
/seed N       sample with this seed from now on; without N, draw new seeds
/system TEXT  replace the system prompt; without TEXT, have none
/reset        forget the conversation
/help         this list
/exit         leave, as Ctrl-D does; Ctrl-C stops an answer and keeps its text"""


class ChatLoop(ABC):
    """The messages of a conversation and its slash commands."""

    def __init__(self, settings: GenerateOptions, system: str | None = None) -> None:
        self.settings, self.system = settings, system
        self.messages: list[dict[str, str]] = []
        self._commands = {
            "/stats": lambda _: console.print_wrapped(self.stats()),
            "/seed": self._seed,
            "/system": self._system,
            "/reset": self._reset,
            "/help": lambda _: console.out.print(HELP),
        }

    @abstractmethod
    def answer(self, question: str) -> None:
        """Print an answer as it is decoded, and call `add_turn`."""

    @abstractmethod
    def stats(self) -> str:
        """Lines about the last answer and all of them; InputError before the first."""

    @abstractmethod
    def forget(self) -> None:
        """Forget all answers and caches."""

    def close(self) -> None:  # noqa: B027 - not every conversation holds something
        """Free resources after the user has left."""

    def turn(self) -> bool:
        """Read one line and run it; False when the user leaves."""
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return False
        except KeyboardInterrupt:
            console.err.print("\nCtrl-D or /exit leaves.", style="dim")
            return True
        except UnicodeDecodeError as error:
            raise InputError(f"Standard input is not valid UTF-8 text: {error}.") from error
        if line.partition(" ")[0] == "/exit":
            return False
        try:
            self._do(line)
        except (InputError, ServerError) as error:
            console.error(str(error))
        return True

    def conversation(self, question: str) -> list[dict[str, str]]:
        messages = [*self.messages, {"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def add_turn(self, question: str, answer: str) -> None:
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})

    def _do(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name in self._commands:
            self._commands[name](argument.strip())
        elif name.startswith("/"):
            raise InputError(f"Unknown command {name}; /help lists them.")
        elif line:
            self.answer(line)

    def _seed(self, argument: str) -> None:
        from moaspec_core.engine.generate_options import sampling_params

        try:
            seed = int(argument) if argument else None
        except ValueError:
            raise InputError(f"/seed takes an integer, got {argument!r}.") from None
        sampling_params({**self.settings, "seed": seed})  # refuses a bad seed
        self.settings["seed"] = seed
        console.out.print("a seed is drawn for each answer" if seed is None else f"seed {seed}")

    def _system(self, argument: str) -> None:
        self.system = argument or None
        console.out.print("system prompt set" if argument else "no system prompt")

    def _reset(self, _: str) -> None:
        self.forget()
        self.messages = []
        console.out.print("conversation forgotten")
