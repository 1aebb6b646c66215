"""`moaspec checkpoint convert | push`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moaspec.hub import PROBE_S
from moaspec_core.cli.options import MODEL, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading, status
from moaspec_core.errors import HubError, InputError
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import require_writable
from moaspec_core.support.proxies import require_proxies

app = typer.Typer(
    name="checkpoint", help="Convert, export and upload drafters.", no_args_is_help=True
)
PUSHED = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
CARD, COMMIT = "README.md", "Upload a moaspec drafter"


@app.command("convert")
@with_options
def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Bundled alias, directory or hub id.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    to: Annotated[
        Literal["moaspec", "raw", "vllm"], "This package's form, or one of the authors' two."
    ],
    model: Annotated[str, "The target it drafts for."] = MODEL,
    num_target_layers: Annotated[
        int | None, "N of a published checkpoint, which does not record it; default: 0."
    ] = None,
    bits: Annotated[
        Literal["8"] | None, "Store each weight in 8 bits; needs --to moaspec; default: as it is."
    ] = None,
) -> None:
    """Convert a drafter checkpoint.

    The form of the source is recognised.

    Example: moaspec checkpoint convert huawei-noah/MOASpec-Llama-3-8B-Instruct out --to moaspec
    --model meta-llama/Meta-Llama-3-8B-Instruct
    """
    if Path(source).resolve() == out.resolve():
        raise InputError(f"{out} is the source itself; name another directory.")
    if num_target_layers is not None and to != "moaspec":
        raise InputError(f"--num-target-layers has no effect: the form {to} does not record N.")
    if bits and to != "moaspec":
        raise InputError(f"--bits is for --to moaspec: nothing else reads eight bits in {to}.")
    require_writable("OUT", out)
    context.with_resource(writing(out))
    with loading(model):
        from moaspec.drafting.proposer_checks import check_num_target_layers
        from moaspec.generation.drafters import find_drafter
        from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint, save_drafter
        from moaspec.model.checkpoint.published import recorded, save_published
        from moaspec.model.checkpoint.weight_files import require_replaceable
        from moaspec.target.registry import named_verifier, read_skeleton
        from moaspec_core.checkpoint.directory import read_config
        from moaspec_core.checkpoint.speculators_fields import read_verifier

        require_replaceable(out)
        target = read_skeleton(model, dtype="float32")
        directory = find_drafter(source)
        drafter = load_checkpoint(directory, target.identity, target.config)
    if num_target_layers is not None:
        if drafter.config.target is not None:
            raise InputError(f"{source} records its N; leave --num-target-layers out.")
        check_num_target_layers(num_target_layers, drafter, target)
    if to == "moaspec":
        drafter = recorded(drafter, target.identity, num_target_layers or 0)
        recorded_json = read_config(directory)
        training = recorded_json.get("training")
        save_drafter(
            drafter,
            out,
            training=training if isinstance(training, dict) else None,
            verifier=read_verifier(recorded_json) or named_verifier(model, target.config),
            int8=bits is not None,
        )
    else:
        save_published(drafter, out, to, target=target.identity, context=target.config)
    console.out.print(f"Written to {out}")


@app.command("push")
@with_options
def push(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a checkpoint.")],
    repository: Annotated[str, typer.Argument(help="Hub id: owner/name.")],
    private: Annotated[bool, "Create the repository as private."] = False,
) -> None:
    """Upload a checkpoint to the hub.

    Its card goes with it, with the hub id in its commands; its weights are checked first.

    Example: moaspec checkpoint push runs/smollm2-135m/drafter me/my-drafter
    """
    with loading(str(checkpoint)):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        from moaspec.model.checkpoint.baseline_checkpoint import read_whole

        read_whole(checkpoint)
    require_proxies()
    hub = HfApi()
    try:
        # Creating a repository is tried for over a minute where the hub cannot be reached.
        with contextlib.suppress(HfHubHTTPError):
            hub.model_info(repository, timeout=PROBE_S)
        hub.create_repo(repository, private=private, exist_ok=True)
        with status(f"Uploading to {repository}"):
            commit = hub.create_commit(
                repository, _additions(checkpoint, repository), commit_message=COMMIT
            )
    except HFValidationError as error:
        raise InputError(f"{repository!r} is no hub id; expected owner/name.") from error
    # The hub's client passes on errors of its HTTP library, which change with versions.
    except Exception as error:
        raise HubError(
            f"Cannot push to {repository}: {type(error).__name__}: {error}. Is the hub in reach, "
            "and are you logged in (hf auth login, or HF_TOKEN) with the right to write there?"
        ) from error
    console.out.print(f"Pushed: {commit.commit_url}")


def _additions(checkpoint: Path, repository: str) -> list[Any]:
    """The files of a commit; the card's commands name the repository."""
    from huggingface_hub import CommitOperationAdd

    files = [file for pattern in PUSHED for file in sorted(checkpoint.glob(pattern))]
    found = [CommitOperationAdd(file.name, str(file)) for file in files]
    card = checkpoint / CARD
    if card.is_file():
        text = re.sub(r"\bDIRECTORY\b", repository, card.read_text(encoding="utf-8"))
        found.append(CommitOperationAdd(CARD, text.encode()))
    return found
