"""Options that had another name: they are refused with the name of today."""

from typing import Any

from typer.core import TyperGroup

from moaspec.errors import InputError

RENAMED = {
    "data regenerate": {"--batch-size": "--batch"},
    "data synth": {"--batch-size": "--batch"},
    "edge": {"--draft": "--tree", "--emulate": "--link"},
    "edge-bench": {"--cut": "--cut-after", "--links": "--link"},
    "remote": {"--draft": "--tree"},
    "target-server": {"--max-cache-gib": "--cache-gib", "--websocket": "--host and --port"},
}
"""Earlier and present names, by command."""


class RenamedOptions(TyperGroup):
    """Commands whose renamed options are told, where "no such option" would not help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (args[:1], args[:2]):
            _refuse(" ".join(words), args[len(words) :])
        return super().resolve_command(ctx, args)


def _refuse(command: str, arguments: list[str]) -> None:
    renamed = RENAMED.get(command, {})
    for argument in arguments:
        if argument == "--":
            return
        old = argument.partition("=")[0]
        if old in renamed:
            raise InputError(f"{old} of `moaspec {command}` was renamed to {renamed[old]}.")
