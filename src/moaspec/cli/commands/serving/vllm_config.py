"""`moaspec vllm-config`: prints a `vllm serve` command."""

import json
import shlex
from typing import Annotated

import typer

from moaspec.cli.options import MODEL, with_options
from moaspec.cli.terminal import console
from moaspec.cli.terminal.status import loading
from moaspec.errors import MismatchError


@with_options
def vllm_config(
    drafter: Annotated[
        str, typer.Argument(help="Bundled alias, directory or hub id of the drafter.")
    ] = MODEL,
    model: Annotated[
        str | None, "Target as vLLM loads it; default: what the drafter records."
    ] = None,
    num_speculative_tokens: Annotated[int, "Tokens of one draft."] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the arguments of vllm.LLM as JSON.")
    ] = False,
) -> None:
    """Print a `vllm serve` command.

    It serves the target with its drafter. vLLM itself is not needed for this.

    Example: moaspec vllm-config smollm2-135m --num-speculative-tokens 2
    """
    with loading(drafter):
        from moaspec.target.registry import find_weights
        from moaspec.vllm_plugin.vllm_settings import VLLMServeSettings

        name = model or _recorded_target(drafter)
        weights = find_weights(name)
    serving = VLLMServeSettings(
        model=weights,
        # A bundled alias is understood by every machine that has this package.
        drafter=drafter,
        num_speculative_tokens=num_speculative_tokens,
    )
    text = json.dumps(serving.engine_arguments) if as_json else shlex.join(serving.command)
    console.out.print(text)


def _recorded_target(drafter: str) -> str:
    from moaspec.generation.drafters import find_drafter
    from moaspec.model.checkpoint.directory import read_config

    config = read_config(find_drafter(drafter))
    name = config.get("training", {}).get("config", {}).get("target")
    if not isinstance(name, str):
        raise MismatchError(
            f"The drafter {drafter!r} does not record its target; name it with --model."
        )
    return name
