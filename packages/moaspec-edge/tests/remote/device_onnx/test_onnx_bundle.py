"""ONNX bundles: what they record, what cannot go into one, damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiny
from bundles import save_drafter_and_target, save_target
from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec.model.baselines import KINDS
from moaspec.model.checkpoint.baseline_checkpoint import save_baseline
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, save_drafter
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, InputError
from moaspec_edge.device.bundle import export_bundle, load_device
from moaspec_edge.device_onnx.manifest import GRAPH_FILE, MOST, is_onnx_bundle, read_manifest
from moaspec_edge.protocol.identity import PROTOCOL, SAMPLING_VERSION
from moaspec_train.students.drafter_sizes import DrafterSizes, stack_config

pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

import onnx
import onnxruntime

from moaspec_edge.device_onnx.onnx_bundle import export_onnx
from moaspec_edge.device_onnx.onnx_ops import BLOCK, TWELVE_BITS, GraphBuilder, Weights


def exported(directory: Path, weights: Weights = "float32") -> Path:
    made = directory / "bundle"
    export_onnx(directory / "target", directory / "drafter", made, weights=weights)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("onnx")
    save_drafter_and_target(directory, trimmed=True, tie_word_embeddings=True)
    return exported(directory, "int8")


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def test_what_a_bundle_records(made: Path) -> None:
    manifest = read_manifest(made)
    target = load_target(made.parent / "target")
    drafter = load_drafter(made.parent / "drafter", target=target)
    assert (manifest.protocol, manifest.sampling_version) == (PROTOCOL, SAMPLING_VERSION)
    assert manifest.fingerprint == fingerprint(drafter)
    assert manifest.target["vocab_size"] == target.vocab_size
    assert manifest.draft_vocabulary == manifest.top == tiny.VOCAB // 2
    assert manifest.max_positions == target.max_positions
    assert manifest.stop_token_ids == sorted(target.stop_token_ids)
    assert {"drafter.onnx", "tokenizer.json"} < set(manifest.files)
    assert is_onnx_bundle(made)


@pytest.mark.parametrize(("exits", "number"), [((2,), 2), ((0, 2), 0), ((1, 0), 0)])
def test_layers_are_in_a_bundle_only_where_drafts_need_them(
    tmp_path: Path, exits: tuple[int, ...], number: int
) -> None:
    save_drafter_and_target(tmp_path, num_target_layers=exits)
    made = exported(tmp_path)
    assert read_manifest(made).num_target_layers == number
    onnx.checker.check_model(onnx.load(made / "drafter.onnx"))


@pytest.mark.parametrize("weights", ["float32", "int8", "int8-web", "int4", "int4-web"])
def test_the_graph_is_valid_and_tied_weights_are_stored_once(
    tmp_path: Path, weights: Weights
) -> None:
    save_drafter_and_target(tmp_path, trimmed=True, tie_word_embeddings=True)
    graph = onnx.load(exported(tmp_path, weights) / "drafter.onnx")
    onnx.checker.check_model(graph)
    if weights == "int4-web":  # one matrix for each product, also of the head
        kinds = [one.data_type for one in graph.graph.initializer]
        products = [node for node in graph.graph.node if node.op_type == "MatMulInteger"]
        assert kinds.count(onnx.TensorProto.INT4) == len(products)
        return
    rows = {tiny.VOCAB, tiny.VOCAB // 2}
    # Scales and the draft vocabulary's ids are smaller.
    tables = [one for one in graph.graph.initializer if np.prod(one.dims) >= 16 * tiny.VOCAB]
    assert len([one for one in tables if rows & set(one.dims[:2])]) == 1


def test_an_export_replaces_any_bundle_and_no_other_files(tmp_path: Path) -> None:
    save_drafter_and_target(tmp_path)
    models = tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle"
    export_bundle(*models)
    exported(tmp_path)
    assert is_onnx_bundle(tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"ONNX bundle: load it by .*\.OnnxDevice"):
        load_device(tmp_path / "bundle")
    export_bundle(*models)
    assert not is_onnx_bundle(tmp_path / "bundle")
    assert load_device(tmp_path / "bundle").info.kind == "moa"
    with pytest.raises(InputError, match="holds no device bundle"):
        export_onnx(*models[:2], tmp_path / "target", weights="int8")


# What cannot go into one


def refuses(directory: Path, match: str) -> None:
    """Before the target's weights, which may take minutes, are read."""
    (directory / "target" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=match):
        exported(directory)


def test_an_independent_drafter_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    shape = stack_config(target, DrafterSizes(), "independent")
    save_baseline(KINDS["independent"](shape), tmp_path / "drafter")
    refuses(tmp_path, "Mixture-of-Attentions")


def test_longrope_is_refused(tmp_path: Path) -> None:
    save_drafter_and_target(tmp_path, "phi3")
    refuses(tmp_path, "LongRoPE")


def test_an_ablation_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    save_drafter(tiny.random_drafter(target, without=("sa",)), tmp_path / "drafter")
    refuses(tmp_path, "without sa")


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    save_drafter_and_target(tmp_path, hidden_act="mish")
    refuses(tmp_path, "activation 'mish'")


# Damage


def edit(bundle: Path, **changes: Any) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sizes(**changes: int) -> dict[str, int]:
    """Those of the largest key, and of the deepest target, that are believed."""
    return {"num_kv_heads": 512, "head_dim": 128, "num_layers": 1024} | changes


def described_files(bundle: Path, more: str) -> dict[str, Any]:
    """The right list of files, and one outside the bundle that is there."""
    shutil.copy(bundle / "tokenizer.json", bundle / more)
    files: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())["files"]
    return files | {more: files["tokenizer.json"]}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


CORRUPT: dict[str, Callable[[Path], object]] = {
    "changed weights": lambda bundle: flip(bundle / "drafter.onnx"),
    "short weights": lambda bundle: (bundle / "drafter.onnx").write_bytes(b"short"),
    "no tokenizer": lambda bundle: (bundle / "tokenizer.json").unlink(),
    "no list of files": lambda bundle: edit(bundle, files={}),
    "files elsewhere": lambda bundle: edit(
        bundle, files=described_files(bundle, "../tokenizer.json")
    ),
    "an unknown field": lambda bundle: edit(bundle, more=1),
    "no sizes": lambda bundle: edit(bundle, self_attention={}),
    "huge sizes": lambda bundle: edit(bundle, max_positions=MOST + 1),
    "halves": lambda bundle: edit(bundle, cross_attention={"num_kv_heads": 1.5, "head_dim": 8}),
    "half a layer": lambda bundle: edit(bundle, num_target_layers=0.5),
    "no layer of SA": lambda bundle: edit(bundle, self_attention_layers=0),
    "many layers of SA": lambda bundle: edit(
        bundle, self_attention_layers=1024, self_attention=sizes()
    ),
    "layers below zero": lambda bundle: edit(bundle, num_target_layers=-1),
    "layers without sizes": lambda bundle: edit(bundle, num_target_layers=1, target={}),
    "no number": lambda bundle: edit(bundle, max_positions=None),
    "more layers than the target": lambda bundle: edit(bundle, num_target_layers=1000),
    "a target of many layers": lambda bundle: edit(bundle, target=sizes(num_layers=1025)),
    "a wide key": lambda bundle: edit(bundle, cross_attention=sizes(num_kv_heads=513)),
    "wide keys": lambda bundle: edit(bundle, num_target_layers=3, target=sizes()),
}
UNKNOWN: dict[str, Callable[[Path], object]] = {
    "another version": lambda bundle: edit(bundle, format_version=99),
    "no manifest": lambda bundle: (bundle / "manifest.json").unlink(),
    "no JSON": lambda bundle: (bundle / "manifest.json").write_text("{"),
    "no object": lambda bundle: (bundle / "manifest.json").write_text("[]"),
    "deep JSON": lambda bundle: (bundle / "manifest.json").write_text("[" * 100_000),
    "open to others": lambda bundle: bundle.chmod(0o777),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_damaged_bundle(bundle: Path, name: str) -> None:
    CORRUPT[name](bundle)
    with pytest.raises(CorruptCheckpointError, match="Export it again"):
        read_manifest(bundle)


def test_a_bundle_of_an_earlier_release(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["self_attention_layers"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert read_manifest(bundle).self_attention_layers == 1


def test_the_largest_caches(bundle: Path) -> None:
    edit(bundle, self_attention=sizes(), cross_attention=sizes(), num_target_layers=0)
    assert read_manifest(bundle).cross_attention == sizes()


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_no_bundle_of_this_version(bundle: Path, name: str) -> None:
    UNKNOWN[name](bundle)
    with pytest.raises(CheckpointError):
        read_manifest(bundle)


# Matrices


@pytest.mark.parametrize("num_inputs", [BLOCK, BLOCK + 16])
@pytest.mark.parametrize(
    ("weights", "steps"), [("int8", 127), ("int8-web", 127), ("int4", 7), ("int4-web", 7)]
)
def test_rows_and_products_of_a_matrix(weights: Weights, steps: int, num_inputs: int) -> None:
    """A row is off by half a step at most; the product is that of these rows."""
    random = np.random.default_rng(0)
    matrix_RI = random.normal(size=(24, num_inputs)).astype(np.float32)
    x_TI = random.normal(size=(3, num_inputs)).astype(np.float32)
    ids = np.array([5, 0, 23])
    builder = GraphBuilder(weights)
    stored = builder.matrix(matrix_RI)
    names = (
        builder.rows("ids", stored),
        builder.product("x", stored),
        builder.product("x", builder.selected(stored, ids)),
    )
    rows, product, selected = run(builder, names, {"ids": ids, "x": x_TI})
    assert np.abs(rows - matrix_RI[ids]).max() <= np.abs(matrix_RI).max() / steps / 2 * 1.001
    # The inputs are quantised to eight bits, too: half a step of each, summed at random signs.
    bound = 4 * np.abs(x_TI).max() / 127 / 2 * np.sqrt(num_inputs) * np.abs(matrix_RI).max()
    np.testing.assert_allclose(product[:, ids], x_TI @ rows.T, atol=bound)
    np.testing.assert_allclose(selected, product[:, ids], rtol=1e-5, atol=1e-5)


def test_two_products_of_int4_web_fit_into_sixteen_bits() -> None:
    """CPUs without VNNI add them there, and cut off what does not fit."""
    builder = GraphBuilder("int4-web")
    stored = builder.matrix(np.random.default_rng(0).normal(size=(24, BLOCK)).astype(np.float32))
    (steps,) = run(builder, (builder.op("Cast", stored.name, to=onnx.TensorProto.FLOAT),), {})
    assert 0 < 2 * 255 * np.abs(steps).max() < 2**15


@pytest.mark.parametrize("weights", ["int8", "int8-web"])
def test_a_product_of_twelve_bits(weights: Weights) -> None:
    """What eight bits leave of weights and inputs is stored or computed beside them."""
    random = np.random.default_rng(0)
    matrix_RI = random.normal(size=(24, BLOCK + 16)).astype(np.float32)
    x_TI = random.normal(size=(3, BLOCK + 16)).astype(np.float32)
    builder = GraphBuilder(weights)
    names = (
        builder.product("x", builder.matrix(matrix_RI, fine=True)),
        builder.product("x", builder.matrix(matrix_RI)),
    )
    errors = [
        np.abs(found - x_TI @ matrix_RI.T).max() for found in run(builder, names, {"x": x_TI})
    ]
    assert errors[0] < errors[1] / 8  # a fourteenth at best


def test_a_layer_for_browsers() -> None:
    """Weights of any sign and size are off by half a step."""
    layer = nn.Linear(BLOCK, 24)
    with torch.no_grad():
        layer.weight[:8] = layer.weight[:8].sign()  # each at an end of its row's range
    builder = GraphBuilder("int8-web")
    x_TI = np.eye(BLOCK, dtype=np.float32)
    (found,) = run(builder, (builder.linear("x", layer),), {"x": x_TI})
    weight_IR, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()
    step_R = np.abs(weight_IR).max(0) / TWELVE_BITS
    # Rounding in float32 comes on top of half a step.
    assert np.all(np.abs(found - bias - weight_IR) <= 0.51 * step_R)


def test_a_graph_has_the_same_operation_once() -> None:
    """Layers of one input share what is made of it."""
    builder = GraphBuilder("int8-web")
    for _ in range(4):
        builder.linear("x", nn.Linear(BLOCK + 16, 200))
    kinds = [node.op_type for node in builder.nodes]
    assert kinds.count("MatMulInteger") == 4
    assert kinds.count("Pad") == kinds.count("Split") == kinds.count("QuantizeLinear") == 1


def test_an_input_gives_the_same_draft_beside_others() -> None:
    """Each row of inputs has a scale of its own: a large one does not coarsen a small one."""
    random = np.random.default_rng(0)
    matrix_RI = random.normal(size=(24, BLOCK)).astype(np.float32)
    x_TI = random.normal(size=(3, BLOCK)).astype(np.float32) * np.array(
        [[1e-3], [1], [1e3]], np.float32
    )
    for fine in (False, True):
        builder = GraphBuilder("int8-web")
        name = builder.product("x", builder.matrix(matrix_RI, fine=fine))
        (together,) = run(builder, (name,), {"x": x_TI})
        alone = [run(builder, (name,), {"x": x_TI[i : i + 1]})[0][0] for i in range(3)]
        np.testing.assert_array_equal(together, alone)
    assert builder.constant([1]) == builder.constant([1]) != builder.constant(1)


GEMMA: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
"""Gemma 3 270M's, which has 18 layers and 262,144 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int4-web"])
def test_four_bits_of_a_large_vocabulary(tmp_path: Path, weights: Weights) -> None:
    """A bundle for Gemma 3 270M has at most 35% of its bytes: two exports show a row's bytes."""
    sizes = []
    for number in (4096, 8192):
        save_drafter_and_target(tmp_path, "gemma3_text", vocab_size=number, **GEMMA)
        sizes.append((exported(tmp_path, weights) / GRAPH_FILE).stat().st_size)
    graph = sizes[0] + (2**18 - 4096) * (sizes[1] - sizes[0]) / 4096
    tokenizer = 33.4e6
    target = 2 * 640 * (2**18 + 18 * 8704)  # 8,704 x 640 weights of a layer
    assert 0.2 < (graph + tokenizer) / target <= 0.35


def run(builder: GraphBuilder, names: tuple[str, ...], inputs: dict[str, Any]) -> list[Any]:
    values = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in inputs.items()
    ]
    outputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
    ]
    graph = onnx.helper.make_graph(builder.nodes, "test", values, outputs, builder.initializers)
    versions = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return list(session.run(list(names), inputs))
