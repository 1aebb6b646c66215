"""The manifest of an ONNX bundle: what a device checks before it drafts. Needs no PyTorch."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moaspec_core.checkpoint.drafter_config import MAX_LAYERS
from moaspec_core.checkpoint.user_files import read_json
from moaspec_core.errors import CheckpointError, CorruptCheckpointError
from moaspec_core.support.paths import why_not_trusted

MANIFEST_FILE = "manifest.json"
GRAPH_FILE = "drafter.onnx"
FORMAT = "moaspec-device-onnx"
FORMAT_VERSION = 1
SAMPLING_VERSION_KEY = "law"  # in files, since the first bundles
MOST = 2**24
"""Largest number of positions, heads or dimensions that a manifest may state."""
MAX_WIDTH = 2**16
"""Largest size of a token's key in one cache, all heads together."""
MAX_TOTAL_WIDTH = 2**17
"""Largest size of a token's keys in all caches: 512 MiB for caches of 512 tokens."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The bytes of the graph's file that a version replaces.

    Attributes:
        packing: the form of these bytes when a server sends them; see `DescribeRequest`.
        ranges: first byte and number of bytes of each part, in the order of sending.
    """

    packing: str
    ranges: list[list[int]]

    @property
    def num_bytes(self) -> int:
        return sum(count for _, count in self.ranges)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of an ONNX bundle.

    Attributes:
        protocol, sampling_version: of messages and of seeded sampling, for `Open`.
        target: fields of the `TargetIdentity` that the server must have.
        fingerprint: of the drafter whose encoder the server must have.
        weights: see `onnx_ops.Weights`.
        opset: version of ONNX's operators.
        self_attention, cross_attention: `num_kv_heads` and `head_dim` of the caches.
        self_attention_layers: of SA, which have a cache each.
        num_target_layers: N; the reused layers' caches have the sizes of `target`.
        draft_vocabulary: number of tokens that can be drafted.
        top: how many tokens a run returns.
        max_positions: tokens of the longest text.
        rope_growth: see `TargetSpec.rope_growth`.
        stop_token_ids: ids that end a turn.
        files: `bytes` and `sha256` of each other file, by name.
        versions: how a later version of the drafter is put into the graph; None (bundles of
            earlier releases) if that is impossible.
    """

    protocol: int
    sampling_version: int
    target: dict[str, Any]
    fingerprint: str
    weights: str
    opset: int
    self_attention: dict[str, int]
    cross_attention: dict[str, int]
    num_target_layers: int
    draft_vocabulary: int
    top: int
    max_positions: int
    rope_growth: int | None
    stop_token_ids: list[int]
    files: dict[str, dict[str, Any]]
    self_attention_layers: int = 1
    versions: Versions | None = None

    def write(self, directory: Path) -> None:
        """Write it as JSON."""
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        values[SAMPLING_VERSION_KEY] = values.pop("sampling_version")
        text = json.dumps(values, indent=2) + "\n"
        (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(directory: str | Path) -> Manifest:
    """Read a bundle's manifest, and compare size and hash of every file with it.

    Raises:
        CheckpointError: no ONNX bundle, another version of the format, or other users may have
            written it.
        CorruptCheckpointError: the manifest or a file is damaged or missing.
    """
    directory = Path(directory)
    values = _read(directory)
    if values.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{directory} is no ONNX bundle. Make one with `moaspec checkpoint export-device "
            "TARGET DRAFTER DIR --format onnx`."
        )
    if values.pop("format_version", None) != FORMAT_VERSION:
        raise CheckpointError(
            f"The bundle at {directory} has another format than {FORMAT_VERSION}; export it again "
            "with this version of moaspec, or upgrade."
        )
    reason = why_not_trusted(directory, directory)
    if reason is not None:
        raise CheckpointError(
            f"The bundle at {directory} is not loaded: {reason}. Only this user may be able to "
            "write it; a copy of it (cp -r) will do."
        )
    try:
        versions = values.pop("versions", None)
        values["sampling_version"] = values.pop(SAMPLING_VERSION_KEY)
        manifest = Manifest(**values, versions=None if versions is None else Versions(**versions))
        damaged = _damaged_file(directory, manifest)
        _check_numbers(manifest)
    except (TypeError, LookupError, AttributeError, ValueError, OSError) as error:
        raise _corrupt(directory, f"its manifest is wrong ({error})") from error
    if damaged is not None:
        raise _corrupt(directory, f"{damaged} is not the file that was exported")
    return manifest


def text_caches(num_layers: int) -> list[tuple[str, str]]:
    """Names of the caches of keys and values of each of SA's layers, inputs of the graph."""
    ends = ("", *(f"_{number}" for number in range(1, num_layers)))
    return [(f"text_key{end}", f"text_value{end}") for end in ends]


def is_onnx_bundle(directory: str | Path) -> bool:
    """Whether a directory holds an ONNX bundle."""
    return _read(Path(directory)).get("format") == FORMAT


def described(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256, hexadecimal, of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _read(directory: Path) -> dict[str, Any]:
    """The fields, none where there is no object of JSON."""
    try:
        values = read_json(directory / MANIFEST_FILE)
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _damaged_file(directory: Path, manifest: Manifest) -> str | None:
    """The first file that is missing or has other contents."""
    if GRAPH_FILE not in manifest.files:
        return GRAPH_FILE
    for name, expected in manifest.files.items():
        path = directory / name
        if path.parent != directory or not path.is_file() or described(path) != expected:
            return name
    return None


def _check_numbers(manifest: Manifest) -> None:
    """Refuse sizes that would only fail when the caches are made."""
    if manifest.versions is not None:
        _check_versions(manifest.versions, manifest.files[GRAPH_FILE]["bytes"])
    reused, layers = manifest.num_target_layers, manifest.target["num_layers"]
    whole = isinstance(reused, int) and isinstance(layers, int)
    if not whole or not 0 <= reused <= layers <= MAX_LAYERS:
        raise ValueError(f"it has {reused!r} reused layers of {layers!r}")
    own = manifest.self_attention_layers
    if not isinstance(own, int) or not 1 <= own <= MAX_LAYERS:
        raise ValueError(f"it has {own!r} layers of SA")
    sizes = [manifest.self_attention, manifest.cross_attention, manifest.target]
    numbers = [size[name] for size in sizes for name in ("num_kv_heads", "head_dim")]
    for number in (*numbers, manifest.max_positions):
        if not isinstance(number, int) or not 1 <= number <= MOST:
            raise ValueError(f"{number!r} is no size of a cache")
    widths = [size["num_kv_heads"] * size["head_dim"] for size in sizes]
    total = own * widths[0] + widths[1] + reused * widths[2]
    if max(widths) > MAX_WIDTH or total > MAX_TOTAL_WIDTH:
        raise ValueError(
            f"its caches have {total} numbers a token, at most {MAX_TOTAL_WIDTH} are allowed"
        )


def _check_versions(versions: Versions, size: int) -> None:
    end = 0
    for start, count in versions.ranges:
        if not isinstance(start, int) or not isinstance(count, int) or start < end or count < 1:
            raise ValueError(f"range [{start!r}, {count!r}] is empty or overlaps the one before")
        end = start + count
    if not versions.ranges or end > size or not isinstance(versions.packing, str):
        raise ValueError(
            f"ranges of a version end at byte {end} of a file of {size}, or are missing"
        )


def _corrupt(directory: Path, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The bundle at {directory} is damaged: {why}. Export it again.")
