"""Checkpoints: ours, published raw and converted; damaged ones; ones of another target."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import tiny
from block_drafts import block_logits
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint, save_drafter
from moaspec.model.checkpoint.moa_config import SECTION
from moaspec.model.checkpoint.published import published_problem
from moaspec.model.checkpoint.tensor_names import to_module_name, to_published_name
from moaspec.model.checkpoint.weight_files import replace_file
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import LayerConfig, TargetIdentity
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, MismatchError
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BIASES = {
    "self_attention.self_attn.q_proj.bias",
    "self_attention.self_attn.k_proj.bias",
    "self_attention.self_attn.v_proj.bias",
}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (SafetensorError("Error while serializing: no space"), "Error while serializing: no space"),
    ],
)
def test_a_file_that_cannot_be_written(error: Exception, why: str, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("some of it")
        raise error

    with pytest.raises(OSError, match=f"{why}: .*a.json"):
        replace_file(tmp_path / "a.json", write)
    assert list(tmp_path.iterdir()) == []
    below = tmp_path / "file"
    below.write_text("")
    with pytest.raises(OSError, match=r"Not a directory: .*a\.json"):
        replace_file(below / "a.json", write)


def load(directory: Path, target: Target | None = None) -> MoADrafter:
    of = target or tiny.target()
    return load_checkpoint(directory, of.identity, of.config)


def saved(directory: Path, drafter: MoADrafter | None = None, **options: Any) -> Path:
    save_drafter(drafter or tiny.random_drafter(tiny.target()), directory, **options)
    return directory


def published(directory: Path, drafter: MoADrafter, config: dict[str, Any]) -> Path:
    """A checkpoint with published tensor names and a config that records little."""
    saved(directory, drafter)
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


def converted_config(target: Target) -> dict[str, Any]:
    """What the published converter leaves: no layer count, no KV heads, no MLP width."""
    return {
        "architectures": ["MOASpecModel"],
        "model_type": "moa_spec",
        "hidden_size": target.identity.hidden_size,
        "kv_hidden_size": target.identity.kv_size,
        "num_attention_heads": target.config.num_attention_heads,
        "rms_norm_eps": target.config.rms_norm_eps,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
    }


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((directory / CONFIG).read_text())
    change(config)
    (directory / CONFIG).write_text(json.dumps(config))


def assert_same(a: MoADrafter, b: MoADrafter) -> None:
    state = b.state_dict()
    assert a.state_dict().keys() == state.keys()
    for name, value in a.state_dict().items():
        assert_close(value, state[name], rtol=0, atol=0)


# Reading what was written


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_round_trip(family: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    loaded = load(saved(tmp_path, drafter, dtype=dtype, training={"steps": 3}), target)
    assert {p.dtype for p in loaded.parameters()} == {dtype or torch.float32}
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not loaded.training
    assert loaded.config == drafter.config
    assert loaded.config.target == target.identity
    assert_same(loaded, drafter.to(dtype or torch.float32))
    assert loaded.encoder.memory_norm is loaded.decoder.cross_attention.input_layernorm
    assert json.loads((tmp_path / CONFIG).read_text())["training"] == {"steps": 3}
    assert sorted(file.name for file in tmp_path.iterdir()) == [CONFIG, WEIGHTS]


def test_weights_in_eight_bits(tmp_path: Path) -> None:
    """They are off by half a step of their row at most, and the file is half of bf16's."""
    drafter = tiny.random_drafter(tiny.target())
    save_drafter(drafter, tmp_path / "wide", dtype=torch.bfloat16)
    save_drafter(drafter, tmp_path / "narrow", int8=True)
    loaded = load(tmp_path / "narrow")
    for (name, before), after in zip(drafter.named_parameters(), loaded.parameters(), strict=True):
        assert after.dtype == torch.bfloat16
        step = before.abs().amax(-1, keepdim=True) / 127 if before.ndim == 2 else 0 * before
        rounding = 2**-8 * before.abs()  # of bf16
        assert bool(((after - before).abs() <= step / 2 + rounding).all()), name
    wide, narrow = ((tmp_path / one / WEIGHTS).stat().st_size for one in ("wide", "narrow"))
    assert narrow < 0.75 * wide  # names and scales count in a file as small as this


@pytest.mark.parametrize("change", ["no rows", "rows of another dtype", "scales of another size"])
def test_damaged_weights_in_eight_bits(change: str, tmp_path: Path) -> None:
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path, int8=True)
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(one for one in tensors if one.endswith(".row_scale"))
    rows = name.removesuffix(".row_scale")
    if change == "no rows":
        del tensors[rows]
    elif change == "rows of another dtype":
        tensors[rows] = tensors[rows].to(torch.uint8)
    else:
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CorruptCheckpointError, match="no int8 matrix"):
        load(tmp_path)


def test_exits_and_acceptance_are_kept(tmp_path: Path) -> None:
    target = tiny.target()
    config = drafter_config(target, DrafterSizes(without=("sa",)), (1, 0))
    config = dataclasses.replace(
        config, acceptance=((0.5, 0.25), (0.4,)), further_acceptance=(((0.3, 0.2),),)
    )
    drafter = MoADrafter(config)
    loaded = load(saved(tmp_path, drafter), target)
    assert loaded.config == config
    assert loaded.config.acceptance_of(1) == ((0.5, 0.25), (0.4,))
    assert loaded.config.acceptance_of(0) == ((0.3, 0.2),)
    assert list(loaded.exits) == ["1", "0"]
    assert_same(loaded, drafter)


@pytest.mark.parametrize("known", [("acceptance",), ()], ids=["first exit's", "none"])
def test_acceptance_that_earlier_versions_recorded(known: tuple[str, ...], tmp_path: Path) -> None:
    config = drafter_config(tiny.target(), DrafterSizes(), (1, 0))
    saved(tmp_path, MoADrafter(dataclasses.replace(config, acceptance=((0.5, 0.25),))))
    content = json.loads((tmp_path / CONFIG).read_text())
    for name in {"acceptance", "further_acceptance"}.difference(known):
        del content["moaspec"][name]
    (tmp_path / CONFIG).write_text(json.dumps(content))
    loaded = load(tmp_path).config
    assert loaded.acceptance_of(1) == loaded.acceptance == (((0.5, 0.25),) if known else ())
    assert loaded.acceptance_of(0) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_rotary_frequencies_are_exact_in_any_dtype(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The drafter must draft with the frequencies that it was trained with."""
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    loaded = load(saved(tmp_path, drafter, dtype=torch.bfloat16), target).to(dtype)
    expected = dict(drafter.named_buffers())
    assert ("decoder.self_rope.long_inv_freq" in expected) == (family == "phi3")
    for name, frequencies in loaded.named_buffers():
        assert_close(frequencies, expected[name], rtol=0, atol=0)


def test_saving_again_replaces_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, tiny.random_drafter(tiny.target(), seed=1))
    second = tiny.random_drafter(tiny.target(), seed=2)
    assert_same(load(saved(tmp_path, second)), second)


def test_changing_a_loaded_drafter_leaves_its_file_alone(tmp_path: Path) -> None:
    """Its weights lie in the mapped file: training writes to copies of its pages."""
    before = (saved(tmp_path) / WEIGHTS).read_bytes()
    drafter = load(tmp_path)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    assert (tmp_path / WEIGHTS).read_bytes() == before
    saved(tmp_path, drafter)  # over the very file that it lies in
    again = load(tmp_path)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_trimmed_vocabulary_is_kept(tmp_path: Path) -> None:
    ids = torch.tensor([1, 5, 63])
    loaded = load(saved(tmp_path, tiny.random_drafter(tiny.target(), draft_token_ids=ids)))
    assert loaded.draft_token_ids is not None
    assert loaded.draft_token_ids.tolist() == [1, 5, 63]


def test_the_heads_moment_is_kept(tmp_path: Path) -> None:
    drafter = tiny.random_drafter(tiny.target())
    assert load(saved(tmp_path, drafter)).head_moment is None
    size = drafter.config.hidden_size
    x = torch.rand(2 * size, size)
    drafter.head_moment = x.T @ x
    loaded = load(saved(tmp_path, drafter)).bfloat16()
    assert loaded.head_moment is not None
    assert torch.equal(loaded.head_moment, drafter.head_moment)
    save_drafter(drafter, tmp_path / "int8", int8=True)  # half of it, in float16
    stored = load_file(tmp_path / "int8" / "model.safetensors")["head_moment"]
    assert stored.shape == (size * (size + 1) // 2,)
    small = load(tmp_path / "int8").head_moment
    assert small is not None
    assert torch.equal(small, drafter.head_moment.half().float())


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(3, 3),
        torch.full((48, 48), torch.nan),
        torch.zeros(48, 48),
        torch.eye(48) - torch.full((48, 48), 0.5),  # no sum of squares
        torch.full((48 * 49 // 2,), -1.0),
        torch.ones(48 * 49 // 2 + 1),
    ],
    ids=["shape", "nan", "zeros", "indefinite", "triangle", "long triangle"],
)
def test_a_moment_that_does_not_fit(wrong: Tensor, tmp_path: Path) -> None:
    assert tiny.random_drafter(tiny.target()).config.hidden_size == 48
    edit_tensors(saved(tmp_path), lambda tensors: tensors.update(head_moment=wrong))
    with pytest.raises(CheckpointError, match="head_moment"):
        load(tmp_path)


def test_several_reused_layers_are_kept(tmp_path: Path) -> None:
    config = drafter_config(tiny.target(), DrafterSizes())
    drafter = MoADrafter(dataclasses.replace(config, num_target_layers=(2, 0)))
    assert load(saved(tmp_path, drafter)).config.num_target_layers == (2, 0)


def test_several_layers_of_sa_are_kept(tmp_path: Path) -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target, sa_layers=3)
    loaded = load(saved(tmp_path, drafter), target)
    assert loaded.config.self_attention_layers == 3
    assert_same(loaded, drafter)
    section = json.loads((tmp_path / CONFIG).read_text())
    del section[SECTION]["self_attention_layers"]  # as in earlier versions
    (tmp_path / CONFIG).write_text(json.dumps(section))
    with pytest.raises(CorruptCheckpointError, match=r"unexpected.*further_self_attention\.0\."):
        load(tmp_path, target)
    problem = published_problem(drafter, "raw", target=target.identity, context=target.config)
    assert problem is not None
    assert "one layer of SA" in problem


def test_names_on_disk_are_the_published_ones(tmp_path: Path) -> None:
    names = set(load_file(saved(tmp_path) / WEIGHTS))
    for layer in ("layer_self_attention", "self_attention", "cross_attention"):
        assert {
            *(f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"),
            *(f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
            f"{layer}.input_layernorm.weight",
            f"{layer}.post_attention_layernorm.weight",
        } <= names
    assert {"Ekv2E.weight", "Ekv2E.bias"} <= names
    biases = {f"layer_self_attention.self_attn.{part}_proj.bias" for part in "qkv"}
    assert len(names - biases) == 3 * 9 + 2
    assert all(to_published_name(to_module_name(name)) == name for name in names)


# Published checkpoints


def test_raw_published_form(tmp_path: Path) -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target, sa_kv_heads=6, lsa_intermediate=20, ca_kv_heads=1)
    # The published rule gives LSA the target's number of query heads: floor(32 / 6) -> 5 is odd,
    # so this target has a width that divides.
    wide = tiny.fresh_target(head_dim=12)
    drafter = tiny.random_drafter(wide, sa_kv_heads=6, lsa_heads=6, ca_kv_heads=1)
    loaded = load(published(tmp_path, drafter, wide.config.to_dict()), wide)
    assert_same(loaded, drafter)
    got, expected = loaded.config, drafter.config
    assert got.layer_self_attention == expected.layer_self_attention
    assert got.self_attention == expected.self_attention
    assert got.cross_attention == expected.cross_attention
    assert got.target is None
    assert got.num_target_layers == (0,)
    ids = torch.tensor([[1, 2, 3]])
    assert_close(
        block_logits(loaded, wide, ids, torch.ones_like(ids), torch.zeros_like(ids)),
        block_logits(drafter, wide, ids, torch.ones_like(ids), torch.zeros_like(ids)),
    )


def nine_heads() -> tuple[Target, MoADrafter]:
    """SmolLM2's shape: 9 query heads, 3 KV heads, and K = 96, which 9 does not divide."""
    target = tiny.fresh_target(
        hidden_size=144, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=2
    )
    config = drafter_config(target, DrafterSizes())
    lsa = LayerConfig(
        hidden_size=96, num_heads=9, num_kv_heads=3, head_dim=10, intermediate_size=40
    )
    torch.manual_seed(0)
    return target, MoADrafter(dataclasses.replace(config, layer_self_attention=lsa))


@pytest.mark.parametrize("form", ["raw", "converted"])
def test_sizes_come_from_the_tensors(form: str, tmp_path: Path) -> None:
    target, drafter = nine_heads()
    config = target.config.to_dict() if form == "raw" else converted_config(target)
    loaded = load(published(tmp_path, drafter, config), target)
    assert load_file(tmp_path / WEIGHTS)["layer_self_attention.self_attn.q_proj.weight"].shape == (
        90,
        96,
    )
    lsa = loaded.config.layer_self_attention
    assert (lsa.num_heads, lsa.num_kv_heads, lsa.head_dim, lsa.intermediate_size) == (9, 3, 10, 40)
    assert_same(loaded, drafter)


def test_converted_form_keeps_the_targets_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = tiny.fresh_target(head_dim=12, rope_parameters=scaling)
    drafter = tiny.random_drafter(target, lsa_heads=6)
    loaded = load(published(tmp_path, drafter, converted_config(target)), target)
    expected = target.model.base_model.rotary_emb.inv_freq
    assert_close(loaded.decoder.self_rope.inv_freq, expected)
    plain = 1 / 5000.0 ** (torch.arange(0, 12, 2) / 12)
    assert_close(loaded.decoder.cross_rope.inv_freq, plain)


def test_published_form_for_a_family_with_names_of_its_own(tmp_path: Path) -> None:
    """Gemma 3 calls its activation otherwise and has rotary embeddings by layer type."""
    target = tiny.fresh_target("gemma3_text", head_dim=12)
    drafter = tiny.random_drafter(target, lsa_heads=6, lsa_kv_heads=6)
    raw = {key: value for key, value in target.config.to_dict().items() if key != "rope_parameters"}
    loaded = load(published(tmp_path, drafter, raw), target)
    assert loaded.config.hidden_act == "gelu_pytorch_tanh"
    assert_close(loaded.decoder.self_rope.inv_freq, drafter.decoder.self_rope.inv_freq)


def test_biases_of_a_qwen2_checkpoint(tmp_path: Path) -> None:
    """SA and LSA have query, key and value biases there, CA has none."""
    target = tiny.fresh_target("qwen2", num_attention_heads=4, hidden_size=32)
    config = drafter_config(target, DrafterSizes())
    drafter = MoADrafter(
        dataclasses.replace(
            config,
            self_attention=dataclasses.replace(config.self_attention, qkv_bias=True),
            layer_self_attention=dataclasses.replace(config.layer_self_attention, qkv_bias=True),
            cross_attention=dataclasses.replace(config.cross_attention, qkv_bias=False),
        )
    )
    loaded = load(published(tmp_path, drafter, target.config.to_dict()), target)
    assert BIASES | {f"layer_{name}" for name in BIASES} | {"Ekv2E.bias"} == {
        name for name in load_file(tmp_path / WEIGHTS) if name.endswith("bias")
    }
    assert loaded.config.self_attention.qkv_bias
    assert loaded.config.layer_self_attention.qkv_bias
    assert not loaded.config.cross_attention.qkv_bias
    assert_same(loaded, drafter)


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 4), ("vocab_size", 65), ("num_key_value_heads", 1)]
)
def test_a_raw_checkpoint_of_another_target(key: str, value: int, tmp_path: Path) -> None:
    """Identity is checked where it is recorded: the raw form has the target's own config."""
    target = tiny.fresh_target(head_dim=12)
    drafter = tiny.random_drafter(target, lsa_heads=6)
    published(tmp_path, drafter, target.config.to_dict() | {key: value})
    with pytest.raises(MismatchError):
        load(tmp_path, target)


def test_a_published_checkpoint_of_another_width(tmp_path: Path) -> None:
    target, drafter = nine_heads()
    published(tmp_path, drafter, converted_config(target))
    with pytest.raises(MismatchError, match="hidden size is 144"):
        load(tmp_path, tiny.target())


def test_a_checkpoint_that_is_no_drafter(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(tiny.target().config.to_dict()))
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / WEIGHTS)
    with pytest.raises(CorruptCheckpointError, match="layer self-attention"):
        load(tmp_path)


# Damaged checkpoints


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_file(name: str, tmp_path: Path) -> None:
    (saved(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, -1, -500])
def test_truncated_weights(kept: int, tmp_path: Path) -> None:
    path = saved(tmp_path) / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02not a safetensors file" * 40, bytes(4096)])
def test_garbage_weights(content: bytes, tmp_path: Path) -> None:
    (saved(tmp_path) / WEIGHTS).write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"weight_map": 1}', b"[" * 99_999], ids=len
)
def test_garbage_index(content: bytes, tmp_path: Path) -> None:
    (saved(tmp_path) / f"{WEIGHTS}.index.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe\x00", b"[" * 99_999], ids=len
)
def test_garbage_config(content: bytes, tmp_path: Path) -> None:
    (saved(tmp_path) / CONFIG).write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(bad: float, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["Ekv2E.bias"][3] = bad

    edit_tensors(saved(tmp_path), spoil)
    with pytest.raises(CorruptCheckpointError, match=r"Ekv2E\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["Ekv2E.bias", "self_attention.self_attn.k_proj.weight", "cross_attention.mlp.up_proj"]
)
def test_missing_tensor(name: str, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]

    edit_tensors(saved(tmp_path), drop)
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path)


@pytest.mark.parametrize("name", ["extra.weight", "self_attention.self_attn.q_proj.bias"])
def test_unexpected_tensor(name: str, tmp_path: Path) -> None:
    edit_tensors(saved(tmp_path), lambda t: t.update({name: torch.zeros(48)}))
    with pytest.raises(CorruptCheckpointError, match=name.rsplit(".", 1)[-1]):
        load(tmp_path)


@pytest.mark.parametrize("name", ["Ekv2E.weight", "layer_self_attention.self_attn.q_proj.weight"])
@pytest.mark.parametrize("shape", [(3, 5), (4,), ()])
@pytest.mark.parametrize("form", ["ours", "raw"])
def test_tensor_of_the_wrong_shape(
    name: str, shape: tuple[int, ...], form: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    if form == "raw":
        (tmp_path / CONFIG).write_text(json.dumps(tiny.target().config.to_dict()))
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"self_attention": {}},
        {"self_attention": None},
        {"num_target_layers": []},
        {"hidden_act": "no such activation"},
        {"unknown": 1},
        {"target": {"model_type": "llama"}},
    ],
    ids=str,
)
def test_inconsistent_sizes(change: dict[str, Any], tmp_path: Path) -> None:
    edit_config(saved(tmp_path), lambda config: config["moaspec"].update(change))
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path)


def test_no_tensors(tmp_path: Path) -> None:
    edit_tensors(saved(tmp_path), lambda tensors: tensors.clear())
    with pytest.raises(CorruptCheckpointError, match="are missing in the checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_eight_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    edit_tensors(saved(tmp_path), lambda t: t.update({"Ekv2E.bias": t["Ekv2E.bias"].to(dtype)}))
    with pytest.raises(CorruptCheckpointError, match=r"is torch\.float8.*must be one of float32"):
        load(tmp_path)


def test_weights_that_are_whole_numbers(tmp_path: Path) -> None:
    """Of a checkpoint that was quantised elsewhere; its scales are not known here."""
    name = "Ekv2E.weight"
    edit_tensors(saved(tmp_path), lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(CorruptCheckpointError, match=r"holds torch\.int8"):
        load(tmp_path)


@pytest.mark.parametrize("heads", [0, -3, "x", None, 2.5])
def test_impossible_heads_of_a_published_checkpoint(heads: Any, tmp_path: Path) -> None:
    target, drafter = nine_heads()
    published(tmp_path, drafter, converted_config(target) | {"num_attention_heads": heads})
    with pytest.raises(CorruptCheckpointError, match=f"1 or more, got {heads!r}"):
        load(tmp_path, target)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("layer", ["layer_self_attention", "self_attention", "cross_attention"])
@pytest.mark.parametrize("size", ["head_dim", "intermediate_size", "num_heads"])
@pytest.mark.parametrize("value", [10**9, 10**30])
def test_absurd_sizes(family: str, layer: str, size: str, value: int, tmp_path: Path) -> None:
    """They are refused before memory is asked for: this machine may have enough to be slow."""
    target = tiny.target(family)
    saved(tmp_path, tiny.random_drafter(target))
    edit_config(tmp_path, lambda c: c["moaspec"][layer].update({size: value}))
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path, target)


def test_a_section_that_is_no_object(tmp_path: Path) -> None:
    edit_config(saved(tmp_path), lambda config: config.update(moaspec=[1]))
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_a_later_format(tmp_path: Path) -> None:
    edit_config(saved(tmp_path), lambda config: config["moaspec"].update(format_version=99))
    with pytest.raises(CheckpointError, match="99"):
        load(tmp_path)


# Another target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen2"),
        ("num_layers", 4),
        ("hidden_size", 96),
        ("num_kv_heads", 4),
        ("head_dim", 16),
        ("vocab_size", 65),
        ("tokenizer_hash", "another"),
    ],
)
def test_another_target(field: str, value: Any, tmp_path: Path) -> None:
    target = tiny.target()
    identity = dataclasses.replace(target.identity, tokenizer_hash="this")
    config = drafter_config(target, DrafterSizes())
    saved(tmp_path, MoADrafter(dataclasses.replace(config, target=identity)))
    load_checkpoint(tmp_path, identity, target.config)
    other: TargetIdentity = dataclasses.replace(identity, **{field: value})
    with pytest.raises(MismatchError, match=str(value)):
        load_checkpoint(tmp_path, other, target.config)


def test_a_tokenizer_that_is_not_recorded_is_not_compared(tmp_path: Path) -> None:
    target = tiny.target()
    identity = dataclasses.replace(target.identity, tokenizer_hash="this")
    load_checkpoint(saved(tmp_path), identity, target.config)


def test_more_reused_layers_than_the_target_has(tmp_path: Path) -> None:
    config = drafter_config(tiny.target(), DrafterSizes())
    saved(tmp_path, MoADrafter(dataclasses.replace(config, num_target_layers=(4,))))
    with pytest.raises(MismatchError, match="num_target_layers"):
        load(tmp_path)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1, tiny.VOCAB]),
        torch.tensor([-1, 3]),
        torch.tensor([], dtype=torch.long),
        torch.tensor([[1, 2]]),
        torch.tensor([1.0, 2.0]),
    ],
    ids=str,
)
def test_draft_vocabulary_that_does_not_fit(ids: Tensor, tmp_path: Path) -> None:
    edit_tensors(saved(tmp_path), lambda tensors: tensors.update(draft_token_ids=ids))
    with pytest.raises(CheckpointError, match="draft"):
        load(tmp_path)
