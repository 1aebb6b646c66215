"""Options of earlier versions: they are refused with what takes their place today."""

from typing import Any

from typer.core import TyperGroup

from moaspec_core.errors import InputError

RENAMED = {
    "data regenerate": {"--batch-size": "--batch"},
    "data synth": {"--batch-size": "--batch"},
    "edge": {"--draft": "--tree", "--emulate": "--link"},
    "edge-bench": {"--cut": "--cut-after", "--links": "--link"},
    "remote": {"--draft": "--tree"},
    "target-server": {"--max-cache-gib": "--cache-gib", "--websocket": "--host and --port"},
}
"""Earlier and present names, by command."""

REMOVED = {
    "check": {
        "--alone": "the first prompt is decoded alone, too",
        "--seeds": "take more prompts, by --limit",
    },
    "data synth": {"--max-samples": "it gives up after 20 samples for each prompt of --num"},
    "edge-bench": {
        "--independent": "name the independent drafter by --drafter, in a run of its own"
    },
    "remote": {"--cut-s": "a cut lasts 3 s"},
}
"""Options that are gone, and what takes their place, by command."""


class RenamedOptions(TyperGroup):
    """Commands whose earlier options are told of, where "no such option" would not help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (args[:1], args[:2]):
            _refuse(" ".join(words), args[len(words) :])
        return super().resolve_command(ctx, args)


def _refuse(command: str, arguments: list[str]) -> None:
    renamed, removed = RENAMED.get(command, {}), REMOVED.get(command, {})
    for argument in arguments:
        if argument == "--":
            return
        old = argument.partition("=")[0]
        if old in renamed:
            raise InputError(f"{old} of `moaspec {command}` was renamed to {renamed[old]}.")
        if old in removed:
            raise InputError(f"{old} of `moaspec {command}` was removed: {removed[old]}.")
