"""Export of ONNX bundles, for devices that draft by onnxruntime."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import onnx

from moaspec.backends.load import load_target
from moaspec.drafting.proposer_checks import check_num_target_layers, check_trained
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec.model.moa import MoADrafter
from moaspec.target.families import has_plain_inputs, is_family, is_usual_norm
from moaspec.target.generic.device_target import FACTOR, device_tensors
from moaspec.target.partial import EMBEDDING, HEAD
from moaspec.target.registry import find_weights
from moaspec.target.target import Target
from moaspec_core.checkpoint.directory import CONFIG_FILE, read_config
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.errors import InputError
from moaspec_edge.device.bundle import read_models
from moaspec_edge.device.bundle_place import replacing, require_free
from moaspec_edge.device_onnx.draft_graph import (
    OPSET,
    TOP,
    DraftGraph,
    ReusedLayers,
    TargetParts,
    check_drafter,
    learned_weights,
)
from moaspec_edge.device_onnx.manifest import GRAPH_FILE, Manifest, Versions, described
from moaspec_edge.device_onnx.onnx_ops import Weights
from moaspec_edge.protocol.identity import PROTOCOL, SAMPLING_VERSION

PACKING_VERSIONS: Mapping[Weights, int] = {
    "float32": 1,
    "int8": 1,
    "int8-web": 2,
    "int4": 1,
    "int4-web": 1,
}
"""Increased when `onnx_ops` or `draft_graph` change how weights are stored or read."""


def export_onnx(
    target: str | Path,
    drafter: str | Path,
    directory: str | Path,
    *,
    weights: Weights,
    num_target_layers: int | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write an ONNX bundle atomically, as `export_bundle` does.

    Args:
        target: alias, directory, GGUF file or hub id.
        drafter: a Mixture-of-Attentions drafter: alias, directory or hub id.
        directory: created if missing; a bundle in it is replaced.
        weights: of all matrices.
        num_target_layers: N; None takes 0 where the drafter has it, else its first.
        tokenizer: see `load_target`.

    Raises:
        InputError: the graph cannot hold this drafter or the target's last layers, the target has
            no tokenizer, or the directory holds other files.
        UnknownModelError: a name is unknown.
        CheckpointError: the drafter is damaged or belongs to another target.
    """
    require_free(Path(directory))
    dtype = _dtype(target)
    skeleton, module = read_models(target, drafter, dtype=dtype, tokenizer=tokenizer)
    if not isinstance(module, MoADrafter):
        raise InputError(
            f"The drafter {drafter} cannot go into an ONNX bundle: these hold "
            "Mixture-of-Attentions drafters. Use another drafter, or a bundle for PyTorch."
        )
    trained = module.config.num_target_layers
    number = num_target_layers
    if number is None:
        number = 0 if 0 in trained else trained[0]
    check_trained(number, module.config)
    check_num_target_layers(number, module, skeleton)
    check_drafter(module)
    if number:
        _reused_layers(skeleton, module, number)
    whole = load_target(target, dtype=dtype, packed=False, tokenizer=tokenizer)
    graph = _graph(whole, module, weights, number)
    with replacing(directory) as made:
        _write(made, whole, module, graph, weights=weights, num_target_layers=number)


def _dtype(target: str | Path) -> str:
    """float32 for a target with float32 weights, such as a GGUF file's, else bfloat16.

    Weights of eight bits and a scale would change if they were rounded to bf16 first.
    """
    directory = Path(find_weights(str(target)))
    config = read_config(directory) if (directory / CONFIG_FILE).is_file() else {}
    return "float32" if config.get("dtype", config.get("torch_dtype")) == "float32" else "bfloat16"


def _graph(
    target: Target, drafter: MoADrafter, weights: Weights, num_target_layers: int
) -> DraftGraph:
    tensors = device_tensors(target, num_layers=0, head_token_ids=drafter.draft_token_ids)
    known = getattr(target.model.get_input_embeddings(), "embed_scale", 1.0)
    parts = TargetParts(
        tensors[f"{EMBEDDING}.weight"],
        float(tensors.get(f"{EMBEDDING}.{FACTOR}", known)),
        tensors.get(f"{HEAD}.weight"),
        tensors.get(f"{HEAD}.bias"),
        target.lm_head.scale,
        target.lm_head.cap,
        _reused_layers(target, drafter, num_target_layers) if num_target_layers else None,
    )
    return DraftGraph(drafter, parts, weights)


def _reused_layers(target: Target, drafter: MoADrafter, number: int) -> ReusedLayers:
    """The target's last layers; InputError where they are not built as Llama's."""
    config, base, first = target.config, target.model.base_model, target.num_layers - number
    layers = list(base.layers[first:])
    plain = [target.plain_layer_state(first + index) is not None for index in range(number)]
    if (
        not (is_family(config) and has_plain_inputs(config) and all(plain))
        or config.hidden_act != drafter.config.hidden_act
        or not (is_usual_norm(base.norm) and hasattr(layers[0].self_attn, "q_proj"))
    ):
        raise InputError(
            f"The last {number} layers of {target.name} cannot go into an ONNX bundle: it holds "
            "layers that are built as Llama's. Use num_target_layers = 0, or a bundle for PyTorch."
        )
    sizes = LayerConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=config.intermediate_size,
    )
    return ReusedLayers(layers, sizes, base.rotary_emb, base.norm)


def _write(
    directory: Path,
    target: Target,
    drafter: MoADrafter,
    graph: DraftGraph,
    *,
    weights: Weights,
    num_target_layers: int,
) -> None:
    assert target.tokenizer is not None, "read_models() has asked"
    directory.mkdir()
    data = graph.build().SerializeToString()
    (directory / GRAPH_FILE).write_bytes(data)
    target.tokenizer.save_pretrained(directory)
    target.model.generation_config.save_pretrained(directory)
    ids = drafter.draft_token_ids
    vocabulary = target.vocab_size if ids is None else len(ids)
    Manifest(
        protocol=PROTOCOL,
        sampling_version=SAMPLING_VERSION,
        target=dataclasses.asdict(target.identity),
        fingerprint=fingerprint(drafter),
        opset=OPSET,
        self_attention=_cache_sizes(drafter.config.self_attention),
        self_attention_layers=drafter.config.self_attention_layers,
        cross_attention=_cache_sizes(drafter.config.cross_attention),
        draft_vocabulary=vocabulary,
        top=min(TOP, vocabulary),
        max_positions=target.max_positions,
        rope_growth=target.rope_growth,
        stop_token_ids=sorted(target.stop_token_ids),
        files={path.name: described(path) for path in sorted(directory.iterdir())},
        weights=weights,
        num_target_layers=num_target_layers,
        versions=Versions(
            packing=_packing(drafter, weights, num_target_layers),
            ranges=_ranges(data, graph.learned),
        ),
    ).write(directory)


def _ranges(data: bytes, tensors: list[onnx.TensorProto]) -> list[list[int]]:
    """First byte and number of bytes of the numbers of tensors in a serialised graph."""
    found, end = list[list[int]](), 0
    for tensor in tensors:
        # Names differ, so each is there once; its numbers are its last field.
        message = tensor.SerializeToString()
        end = data.index(message, end) + len(message)
        assert message.endswith(tensor.raw_data)
        found.append([end - len(tensor.raw_data), len(tensor.raw_data)])
    return found


def packed_version(drafter: MoADrafter, packing: str) -> bytes | None:
    """The bytes of a version for bundles with this `Versions.packing`; None for an unknown one.

    Raises:
        InputError: a graph cannot hold this drafter.
    """
    for number in map(int, drafter.exits or ["0"]):
        for weights in get_args(Weights):
            if packing == _packing(drafter, weights, number):
                return learned_weights(drafter, weights, number)
    return None


def _packing(drafter: MoADrafter, weights: Weights, num_target_layers: int) -> str:
    """A name for the form of the learned weights. N matters where the drafter has exits."""
    number = num_target_layers if drafter.exits else 0
    return f"onnx/{PACKING_VERSIONS[weights]}/{weights}/{number}"


def _cache_sizes(layer: LayerConfig) -> dict[str, int]:
    return {"num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
