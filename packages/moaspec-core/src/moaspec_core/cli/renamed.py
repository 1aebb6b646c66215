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
    "target-server": {
        "--max-cache-gib": "--cache-gib",
        "--websocket": "--host and --port",
        "--tls-certificate": "--certificate",
        "--tls-key": "--key",
    },
}
"""Earlier and present names, by command."""

AUTO_COPIES = "copies are drafted where they pay"
PLAINLY = "--drafter none decodes plainly"
GROUPS = "64 conversations are saved together"
OWN_DIRECTORY = "--model takes the directory of the model's own config.json and tokenizer.json"
ONLY_LIMIT = "bodies have at most 8 MiB; a reverse proxy can allow less"
WITHOUT_FILE = "remove the setting from the model's generation_config.json"

REMOVED = {
    "calibrate": {
        "--adapter": "an adapter changes no costs",
        "--num-target-layers": "each N that the drafter has is measured",
        "--tokenizer": "`moaspec serve` measures such a target while it is idle",
    },
    "chat": {
        "--free-branches": AUTO_COPIES,
        "--no-speculation": PLAINLY,
        "--speculation": "it is the default",
    },
    "check": {
        "--alone": "the first prompt is decoded alone, too",
        "--seeds": "take more prompts, by --limit",
    },
    "checkpoint convert": {"--tokenizer": OWN_DIRECTORY},
    "checkpoint export-device": {"--int4": "write --bits 4", "--int8": "write --bits 8"},
    "checkpoint push": {"--revision": "`hf upload --revision` takes a branch"},
    "data overlap": {
        "--size": "eight words in a row count",
        "--tokenizer": OWN_DIRECTORY,
    },
    "data regenerate": {
        "--group-size": GROUPS,
        "--without-system": "half of the conversations get no system prompt",
    },
    "data stats": {"--tokenizer": OWN_DIRECTORY},
    "data synth": {
        "--generation-config": WITHOUT_FILE,
        "--group-size": GROUPS,
        "--max-samples": "it gives up after 20 samples for each prompt of --num",
    },
    "edge": {"--max-body-bytes": ONLY_LIMIT},
    "edge-bench": {
        "--codec": "activations are sent in int8",
        "--drafted": "four tokens are drafted for a round",
        "--dtype": "it is that of --dtype auto elsewhere",
        "--independent": "name the independent drafter by --drafter, in a run of its own",
        "--int8": "the device's weights have 16 bits",
        "--threads": "each process has one thread",
    },
    "eval": {
        "--system": "the chat template's own system prompt is used",
        "--turns": "all turns are decoded",
        "--unsafe": "install bubblewrap, or allow unprivileged user namespaces",
    },
    "generate": {
        "--free-branches": AUTO_COPIES,
        "--no-speculation": PLAINLY,
        "--num-choices": "run it several times, or ask `moaspec serve` for `n` choices",
        "--speculation": "it is the default",
    },
    "remote": {
        "--cut-s": "a cut lasts 3 s",
        "--generation-config": WITHOUT_FILE,
        "--prefix-dir": "`moaspec edge` keeps activations of prompts",
    },
    "serve": {
        "--free-branches": AUTO_COPIES,
        "--max-body-bytes": ONLY_LIMIT,
        "--no-speculation": PLAINLY,
        "--speculation": "it is the default",
    },
    "target-server": {"--traces": "run it by `opentelemetry-instrument`, which exports its spans"},
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
