"""`moaspec info CHECKPOINT`: shows the contents of a checkpoint."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moaspec_core.bundled import bundled_drafters
from moaspec_core.checkpoint.directory import is_directory, read_config
from moaspec_core.cli.options import Json
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError, UnknownModelError
from moaspec_core.support.extras import has_torch, install_command
from moaspec_edge.device_onnx.manifest import is_onnx_bundle, read_manifest


def info(
    checkpoint: Annotated[str, typer.Argument(help="Bundled alias or directory.")],
    as_json: Json = False,
) -> None:
    """Show the contents of a checkpoint or bundle.

    Its weights are read and checked.

    Example: moaspec info smollm2-135m
    """
    directory = bundled_drafters().get(checkpoint, Path(checkpoint))
    if not is_directory(directory):
        raise UnknownModelError(
            f"No checkpoint {checkpoint!r}: not a directory, and not bundled "
            f"({', '.join(bundled_drafters()) or 'none'})."
        )
    needs_torch = not is_onnx_bundle(directory)
    if needs_torch and not has_torch():
        raise InputError(
            f"{directory} holds no ONNX bundle, or its manifest.json is damaged; without PyTorch "
            f"`moaspec info` shows nothing else: {install_command(package='moaspec')}."
        )
    with loading(checkpoint, torch=needs_torch):
        facts = _describe_any(directory)
    if as_json:
        console.out.print(json.dumps(facts))
        return
    lines = list(_lines(facts))
    width = max(len(name) for name, _ in lines)
    console.out.print(Text(str(directory), style="bold"))
    for name, value in lines:
        line = Text(f"{name:<{width}}  {value}")
        console.out.print(line, soft_wrap=False, no_wrap=True, overflow="ellipsis")
    console.print_wrapped("--json prints long values whole.", "dim")


def _lines(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names and values; a nested key has the name of its parent before it."""
    for key, value in facts.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from _lines(value, f"{name}.")
        elif isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, json.dumps(value) if isinstance(value, dict | list) else str(value)


def describe(directory: Path) -> dict[str, Any]:
    """Facts of a checkpoint, its weights read and checked."""
    from moaspec.model.checkpoint.baseline_checkpoint import read_whole
    from moaspec.model.checkpoint.moa_config import SECTION
    from moaspec.model.checkpoint.tensor_names import DRAFT_TOKENS, HEAD_MOMENT
    from moaspec_core.checkpoint.directory import BASELINE_SECTION

    config, tensors = read_whole(directory)
    draft_tokens, _ = tensors.pop(DRAFT_TOKENS, None), tensors.pop(HEAD_MOMENT, None)
    ours = config.get(SECTION) or config.get(BASELINE_SECTION) or {}
    form = "moaspec" if SECTION in config else "published"
    if BASELINE_SECTION in config:
        form = f"baseline ({config[BASELINE_SECTION]['kind']})"
    return {
        "format": form,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
        "bytes": sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        "num_target_layers": ours.get("num_target_layers", "not recorded"),
        "draft_vocabulary": "full" if draft_tokens is None else len(draft_tokens),
        "target": ours.get("target") or "not recorded",
        "training": config.get("training", {}),
    }


def _describe_any(directory: Path) -> dict[str, Any]:
    if is_onnx_bundle(directory):
        facts = asdict(read_manifest(directory))
        size = sum(one["bytes"] for one in facts.pop("files").values())
        facts["versions"] = facts["versions"] and facts["versions"]["packing"]
        return {"format": "ONNX device bundle", "bytes": size, **facts}
    if "moaspec_device" in read_config(directory):
        return describe_bundle(directory)
    return describe(directory)


def describe_bundle(directory: Path) -> dict[str, Any]:
    """Facts of a device bundle, its weights read and checked."""
    from moaspec.model.checkpoint.tensor_names import DRAFT_TOKENS
    from moaspec.model.checkpoint.weight_files import read_tensors
    from moaspec_edge.device.bundle import read_bundle_info

    info, tensors = read_bundle_info(directory), read_tensors(directory)
    return {
        "format": "device bundle",
        "drafter": info.kind,
        "weights": info.weights,
        "bytes": sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        "num_target_layers": info.num_target_layers,
        "draft_vocabulary": len(tensors[DRAFT_TOKENS]) if DRAFT_TOKENS in tensors else "full",
        "target": asdict(info.target),
        "fingerprint": info.fingerprint,
    }
