"""`moaspec vllm-config`: prints a `vllm serve` command."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from moaspec_core.checkpoint.directory import is_directory, read_config
from moaspec_core.checkpoint.speculators_fields import DRAFT_TOKENS, read_verifier
from moaspec_core.cli.options import MODEL, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError, MismatchError

DrafterName = Annotated[
    str, typer.Argument(help="Bundled alias, directory or hub id of the drafter.")
]
TargetName = Annotated[str | None, "Target as vLLM loads it; default: what the drafter records."]
DraftLength = Annotated[int, "Tokens of one draft, 1 to 16."]


@with_options
def vllm_config(
    drafter: DrafterName = MODEL,
    model: TargetName = None,
    num_speculative_tokens: Annotated[
        int | None, "Tokens of one draft, 1 to 16; default: what the drafter records, else 3."
    ] = None,
    draft_up_to: Annotated[
        int | None,
        "Draft in steps of up to this number of requests; default: where measured times say it "
        "pays.",
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the arguments of vllm.LLM as JSON.")
    ] = False,
) -> None:
    """Print a `vllm serve` command.

    It serves the target with its drafter. vLLM itself is not needed for this. A target in a
    directory here is compared with the drafter.

    Example: moaspec vllm-config smollm2-135m --num-speculative-tokens 2
    """
    refuse_empty({"DRAFTER": drafter, "--model": model})
    with loading(drafter):
        from moaspec_vllm.vllm_settings import VLLMServeSettings

        config, weights = find_both(drafter, model)
    serving = VLLMServeSettings(
        model=weights,
        # A bundled alias is understood by every machine that has this package.
        drafter=drafter,
        num_speculative_tokens=recorded_tokens(config)
        if num_speculative_tokens is None
        else num_speculative_tokens,
        draft_up_to=draft_up_to,
    )
    text = json.dumps(serving.engine_arguments) if as_json else shlex.join(serving.command)
    console.out.print(text)


def refuse_empty(names: Mapping[str, str | None]) -> None:
    """A shell variable that is not set; an empty path would be the working directory."""
    for option, name in names.items():
        if name is not None and not name.strip():
            raise InputError(f"{option} is empty: name a directory, an alias or a hub id.")


def find_both(drafter: str, model: str | None) -> tuple[dict[str, Any], str]:
    """The drafter's `config.json`, and its target as vLLM loads it.

    Args:
        drafter: alias, directory or hub id.
        model: the target; None: what the drafter records.

    Raises:
        MismatchError: vLLM would refuse the drafter, or it is for another target.
    """
    from moaspec.generation.drafters import check_drafter
    from moaspec.target.registry import find_weights

    config = usable_config(drafter)
    name = recorded_target(drafter, config) if model is None else model
    weights = find_weights(name)
    if is_directory(Path(weights)):  # a model of the hub is not downloaded for this
        check_drafter(drafter, name)
    return config, weights


def usable_config(drafter: str) -> dict[str, Any]:
    """The drafter's `config.json`; MismatchError if vLLM would refuse the drafter."""
    from moaspec.generation.destinations import vllm_problem
    from moaspec.generation.drafters import find_drafter
    from moaspec.model.checkpoint.baseline_checkpoint import is_baseline
    from moaspec.model.checkpoint.moa_config import SECTION, recorded_config

    directory = find_drafter(drafter)
    config, problem = read_config(directory), None
    if is_baseline(directory):
        problem = vllm_problem(None)
    elif SECTION in config:  # a published checkpoint does not record its sizes
        problem = vllm_problem(recorded_config(config))
    if problem is not None:
        raise MismatchError(problem)
    return config


def recorded_target(drafter: str, config: Mapping[str, Any]) -> str:
    """The target that a drafter's `config.json` names; MismatchError if it names none."""
    try:
        name = config["training"]["config"]["target"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        verifier = read_verifier(config)
        name = verifier and verifier.name
    if name is None:
        raise MismatchError(
            f"The drafter {drafter!r} does not record its target; name it with --model."
        )
    return name


def recorded_tokens(config: Mapping[str, Any]) -> int:
    """The length of a chain of drafts that a drafter's `config.json` names."""
    verifier = read_verifier(config)
    return DRAFT_TOKENS if verifier is None else verifier.draft_tokens
