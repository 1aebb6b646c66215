"""What `moaspec info` shows of a checkpoint."""

from pathlib import Path
from typing import Any

from moaspec_core.cli.info import Format


def describe(directory: Path) -> dict[str, Any]:
    """The contents of a checkpoint, its weights read and checked."""
    from moaspec.model.checkpoint.baseline_checkpoint import read_whole
    from moaspec.model.checkpoint.moa_config import SECTION
    from moaspec.model.checkpoint.tensor_names import DRAFT_TOKENS, HEAD_MOMENT
    from moaspec_core.checkpoint.directory import BASELINE_SECTION
    from moaspec_core.checkpoint.speculators_fields import SECTION as SPECULATORS

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
        "speculators": config.get(SPECULATORS) or "not recorded",
        "training": config.get("training", {}),
    }


CHECKPOINT = Format(recognises=lambda _: True, describe=describe, needs_torch=True)
