"""What `moaspec info` shows of a device's bundle."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from moaspec_core.checkpoint.directory import read_config
from moaspec_core.cli.info import Format
from moaspec_edge.device_onnx.manifest import is_onnx_bundle, read_manifest


def describe_onnx(directory: Path) -> dict[str, Any]:
    """What is known of an ONNX bundle, its files checked."""
    content = asdict(read_manifest(directory))
    size = sum(one["bytes"] for one in content.pop("files").values())
    content["versions"] = content["versions"] and content["versions"]["packing"]
    return {"format": "ONNX device bundle", "bytes": size, **content}


def describe_bundle(directory: Path) -> dict[str, Any]:
    """The contents of a device bundle, its weights read and checked."""
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


def is_torch_bundle(directory: Path) -> bool:
    """Whether a directory is a bundle of PyTorch's weights."""
    return (directory / "config.json").is_file() and "moaspec_device" in read_config(directory)


ONNX = Format(recognises=is_onnx_bundle, describe=describe_onnx, needs_torch=False)
TORCH = Format(recognises=is_torch_bundle, describe=describe_bundle, needs_torch=True)
