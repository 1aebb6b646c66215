"""`moaspec checkpoint export-device`: writes bundles for devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moaspec_core.cli.options import Tokenizer, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError
from moaspec_core.support.extras import require
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import require_writable
from moaspec_edge.device_onnx.manifest import GRAPH_FILE

if TYPE_CHECKING:
    from moaspec_edge.device_onnx.onnx_ops import Weights

MAX_WASM_BYTES = 1_000_000_000  # a page that needs more memory does not run on every phone


@with_options
def export_device(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Target: alias, directory, GGUF or hub id.")],
    drafter: Annotated[str, typer.Argument(help="Its drafter: alias, directory or hub id.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; a bundle in it is replaced.")],
    form: Annotated[
        Literal["torch", "onnx", "onnx-web"],
        typer.Option(
            "--format",
            help="What drafts on the device: PyTorch, onnxruntime, or onnxruntime in browsers.",
        ),
    ] = "torch",
    bits: Annotated[
        Literal["8", "4"] | None,
        "Store each weight in 8 bits or, not for PyTorch, in 4; default: 16, for ONNX 32.",
    ] = None,
    num_target_layers: Annotated[
        int | None,
        typer.Option(
            help="Last target layers to include; default: the checkpoint's N, for ONNX 0 if it "
            "has that.",
            min=0,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Write a bundle for a device.

    A bundle is all that a device needs to draft for a target on a server.

    Example: moaspec checkpoint export-device smollm2-135m smollm2-135m device --bits 8
    """
    if form != "torch":
        require("`moaspec checkpoint export-device`", "moaspec-edge[export]")
    require_writable("OUT", out)
    if form == "torch" and bits == "4":
        raise InputError(
            "--bits 4 needs --format onnx or onnx-web; PyTorch's bundles have 16 or 8 bits."
        )
    weights = _onnx_weights(form, bits)
    # Imported here, because the command line starts without it; it loads nothing large.
    from moaspec_edge.device.bundle_place import require_free

    require_free(out)
    context.with_resource(writing(out))
    with loading(target):
        if form == "torch":
            from moaspec_edge.device.bundle import export_bundle

            export_bundle(
                target,
                drafter,
                out,
                int8=bits == "8",
                num_target_layers=num_target_layers,
                tokenizer=tokenizer,
            )
        else:
            from moaspec_edge.device_onnx.onnx_bundle import export_onnx

            export_onnx(
                target,
                drafter,
                out,
                weights=weights,
                num_target_layers=num_target_layers,
                tokenizer=tokenizer,
            )
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    written = f"Written to {out}: {size / 1e6:.1f} MB"
    if form != "onnx-web":
        console.out.print(written)
        return
    memory = _wasm_bytes(out, weights)
    console.out.print(f"{written}; a browser holds its weights in about {memory / 1e6:.0f} MB")
    if memory > MAX_WASM_BYTES:
        console.warn(
            "WebAssembly has at most 4 GB of memory, and phones often give a page less than 1 GB. "
            "Compare --bits 8 with --bits 4, or take a drafter with fewer weights."
        )


def _wasm_bytes(bundle: Path, weights: Weights) -> int:
    import onnx

    from moaspec_edge.device_onnx.onnx_ops import wasm_bytes

    return wasm_bytes(onnx.load(bundle / GRAPH_FILE), weights)


def _onnx_weights(form: str, bits: Literal["8", "4"] | None) -> Weights:
    if bits == "4":
        return "int4" if form == "onnx" else "int4-web"
    if bits == "8":
        return "int8" if form == "onnx" else "int8-web"
    return "float32"
