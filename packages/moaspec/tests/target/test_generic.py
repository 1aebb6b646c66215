"""Models of any type by transformers' own modules; see `docs/models.md`."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, T5Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

import generic_models
import moaspec
import tiny
from moaspec.evaluate.correctness.check_target import Check
from moaspec.generation.transformers_hook import custom_generate
from moaspec.target.decoder_layers import cache_argument
from moaspec.target.generic import generic_target
from moaspec.target.generic.generic_target import GenericTarget, target_of
from moaspec.target.generic.pass_cache import KVShape, PassCache
from moaspec.target.generic.pass_masks import NAMES, PassMasks, masks_of_pass
from moaspec.target.generic.rules import require_generic_config
from moaspec.target.generic.self_test import require_equal
from moaspec.target.registry import skeleton_of
from moaspec_core.errors import InputError, UnsupportedTargetError
from moaspec_train.dataset.examples import Example

LENGTH = 12
"""More than a window, and of several rounds."""
PROMPTS = tiny.PROMPTS[:3]
DOCS = Path(__file__).parents[4] / "docs" / "models.md"
every_type = pytest.mark.parametrize("kind", generic_models.KINDS)


@functools.cache
def target(kind: str) -> GenericTarget:
    return GenericTarget(generic_models.model(kind), None, name=f"tiny-{kind}")


@functools.cache
def stock(kind: str) -> GenericTarget:
    """A target whose model attends by transformers alone."""
    made = GenericTarget(generic_models.model(kind), None, name=f"stock-{kind}")
    own = {ours: theirs for theirs, ours in NAMES.items()}
    made.config._attn_implementation = own[made.config._attn_implementation]
    return made


@every_type
def test_without_weights_it_has_the_same_keys(kind: str) -> None:
    skeleton = skeleton_of(generic_models.config(kind), "float32")
    found = GenericTarget(skeleton, None, name=kind)
    assert found.layers.kv_shape == target(kind).layers.kv_shape


def own_pairs(kind: str, ids_1T: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of each layer in transformers' cache."""
    model, cache = stock(kind).model, DynamicCache()
    model(input_ids=ids_1T, use_cache=True, **{cache_argument(model): cache})
    pairs = {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}
    return {i: (k, v) for i, (k, v) in pairs.items() if k is not None}


@pytest.mark.slow
@every_type
@pytest.mark.parametrize("pads", [0, 3])
def test_captured_keys_and_values(kind: str, pads: int) -> None:
    text, made = list(PROMPTS[2]), target(kind)
    ids_1T = torch.tensor([[0] * pads + text])
    mask_1T = torch.tensor([[0] * pads + [1] * len(text)])
    kv_TLK = made.capture(ids_1T, mask_1T).kv_BTLK[0, pads:]
    pairs = own_pairs(kind, torch.tensor([text]))
    assert len(pairs) == made.num_layers
    for layer, pair in enumerate(pairs.values()):
        parts = kv_TLK[:, layer].unflatten(-1, (made.num_kv_heads, -1)).chunk(2, dim=-1)
        for got_THD, own_BHTD in zip(parts, pair, strict=True):
            padded_THD = torch.zeros_like(got_THD)
            padded_THD[:, : own_BHTD.shape[1], : own_BHTD.shape[3]] = own_BHTD[0].transpose(0, 1)
            torch.testing.assert_close(got_THD, padded_THD, **tiny.TOLERANCE)


@pytest.mark.slow
@every_type
def test_check_is_right(kind: str) -> None:
    """Greedy and sampled, by chain and tree, with a drafter that disagrees, in ragged batches."""
    made = target(kind)
    check = Check(
        target=made,
        prompts=PROMPTS,
        drafter=tiny.random_drafter(made),
        stock=stock(kind),
        max_new_tokens=LENGTH,
        alone=0,
    )
    findings = list(check.run())
    assert len(findings) == check.num_texts
    assert [finding for finding in findings if not finding.lossless] == []


def test_the_documentation_lists_all_types() -> None:
    assert len(generic_models.KINDS) >= 30
    assert generic_models.table() in DOCS.read_text()


def test_an_unchanged_model_for_other_callers() -> None:
    """Outside of our passes the model attends as transformers does, bit for bit."""
    ids_1T = torch.tensor([PROMPTS[2]])
    for kind in ("mixtral", "gpt_oss"):
        ours, own = target(kind).model, stock(kind).model
        assert ours.config._attn_implementation != own.config._attn_implementation
        assert torch.equal(ours(input_ids=ids_1T).logits, own(input_ids=ids_1T).logits)


def test_families_keep_their_own_path() -> None:
    assert type(target_of(tiny.model("qwen3"), None, name="x")) is moaspec.Target
    assert type(target_of(generic_models.model("qwen3_moe"), None, name="x")) is GenericTarget


def test_masks_that_hide_nothing_are_left_out() -> None:
    """As transformers does, whose kernels are faster without."""
    one, whole = torch.ones(1, 1, 1, 3), torch.ones(1, 1, 3, 3).tril()
    hiding = torch.tensor([[[[1, 0, 1]]]])
    for mask, plain in ((one, True), (whole, True), (hiding, False), (whole[:, :, 1:], False)):
        positions = torch.arange(mask.shape[2])[None]
        found = PassMasks(mask.bool(), positions).of(causal_mask_function)
        assert (found is None) == plain


@pytest.mark.parametrize("num", [1, 5])
def test_attention_of_grouped_heads(num: int) -> None:
    """Equals transformers', which copies the keys that heads share or takes slower kernels."""
    query, key, value = (
        torch.randn(2, heads, size, 8) for heads, size in ((6, num), (2, 9), (2, 9))
    )
    mask = torch.rand(2, 1, num, 9) < 0.5
    mask[..., 0] = True
    module = SimpleNamespace(num_key_value_groups=3)
    attend = AttentionInterface()[NAMES["sdpa"]]
    for given in (mask, None) if num == 1 else (mask,):
        right, _ = sdpa_attention_forward(module, query, key, value, given, scaling=0.3)
        with masks_of_pass(PassMasks(given, torch.zeros(2, num))):
            ours, _ = attend(module, query, key, value, given, scaling=0.3)
        # Float32 sums in another order.
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


Plant = Callable[[pytest.MonkeyPatch], None]


def _blind_to_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassMasks, "of", lambda *_: None)


def _shifted_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    update = PassCache.update

    def shifted(self: Any, key: Tensor, *rest: Any, **options: Any) -> Any:
        return update(self, key.roll(1, dims=-1), *rest, **options)

    monkeypatch.setattr(PassCache, "update", shifted)


def _twice(monkeypatch: pytest.MonkeyPatch) -> None:
    update = PassCache.update

    def twice(self: Any, *args: Any, **options: Any) -> Any:
        update(self, *args, **options)
        return update(self, *args, **options)

    monkeypatch.setattr(PassCache, "update", twice)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (_blind_to_masks, "does not attend by our masks"),
        (_shifted_keys, "does not attend by our masks"),
        (_twice, "more than one pair a token"),
    ],
)
def test_the_self_test_finds_faults(
    plant: Plant, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = generic_models.model("granite")
    plant(monkeypatch)
    with pytest.raises(UnsupportedTargetError, match=reason):
        GenericTarget(model, None, name="x")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "doge": ({}, "chooses keys by their content"),
    "falcon": ({}, "number of tokens before these"),
    "mamba": ({"state_size": 4}, "none of its layers keeps keys and values"),
    "opt": ({"ffn_dim": 56, "word_embed_proj_dim": 48}, "number of tokens before these"),
    "minimax": ({"layer_types": ["linear_attention", "full_attention"]}, "keep these in"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_models(kind: str) -> None:
    changes, reason = REFUSED[kind]
    layers = len(changes.get("layer_types", ())) or 2
    model = generic_models.model(kind, num_hidden_layers=layers, **changes)
    with pytest.raises(UnsupportedTargetError, match=reason) as caught:
        GenericTarget(model, None, name="x")
    assert f"{kind!r} model" in str(caught.value)


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="encoder"):
        require_generic_config(T5Config(), "x")


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
)
def test_a_text_ends_where_keys_would_change(rope: dict[str, Any], length: int) -> None:
    model = generic_models.model("granite", rope_parameters=rope | {"rope_theta": 100.0})
    assert GenericTarget(model, None, name="x").max_positions == length


def test_llama_4_is_held_to_its_unscaled_length() -> None:
    assert target("llama4_text").max_positions == 256
    model = generic_models.model("llama4_text", floor_scale=64)
    assert GenericTarget(model, None, name="x").max_positions == 63


def test_layers_that_cannot_be_reused() -> None:
    made = target("granite")
    with pytest.raises(InputError, match="0 can be reused"):
        tiny.random_drafter(made, exits=(1,))
    with pytest.raises(UnsupportedTargetError, match="num_target_layers=0"):
        made.layers.run()


def test_quantize_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="int8"):
        GenericTarget(generic_models.model("granite"), None, name="x", quantize="int8")


def test_flash_attention_is_refused() -> None:
    model = generic_models.model("granite")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedTargetError, match="attn_implementation='sdpa'"):
        GenericTarget(model, None, name="x")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3"])
def test_loaded_from_a_directory(kind: str, tmp_path: Path) -> None:
    model = generic_models.model(kind)
    model.save_pretrained(tmp_path)
    loaded = moaspec.load_target(tmp_path, dtype="float32")
    assert isinstance(loaded, GenericTarget)
    drafter = tiny.random_drafter(loaded)
    result = moaspec.generate(
        loaded, PROMPTS[1], drafter=drafter, max_new_tokens=LENGTH, tree=moaspec.Tree(3, 2, 6)
    )
    assert result.token_ids == tiny.own_text(stock(kind), PROMPTS[1], LENGTH)


def test_the_self_test_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the model is changed, or goes; nothing keeps it alive."""
    tested: list[Any] = []

    def counted(target: GenericTarget) -> KVShape:
        tested.append(None)
        return require_equal(target)

    monkeypatch.setattr(generic_target, "require_equal", counted)
    model = generic_models.model("granite")
    for _ in range(2):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, custom_generate=custom_generate())
    assert len(tested) == 1
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)
    GenericTarget(model, None, name="x")
    assert len(tested) == 2
    GenericTarget(model.double(), None, name="x")
    assert len(tested) == 3
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_inside_generate_of_transformers() -> None:
    model, kind = generic_models.model("gemma3"), "gemma3"
    ids_1T = torch.tensor([PROMPTS[1]])
    hook = custom_generate(tiny.random_drafter(target(kind)), tree=moaspec.Chain(3))
    got = model.generate(ids_1T, max_new_tokens=LENGTH, do_sample=False, custom_generate=hook)
    assert got[0, ids_1T.shape[1] :].tolist() == tiny.own_text(stock(kind), PROMPTS[1], LENGTH)
    with pytest.raises(InputError, match=r"decodes text, and got (image|pixel_values)"):
        model.generate(
            ids_1T,
            max_new_tokens=2,
            custom_generate=hook,
            pixel_values=torch.zeros(1, 3, 28, 28),
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gemma3n_text"])
def test_a_drafter_is_trained(kind: str) -> None:
    """Losses are finite, and a drafter that knows the texts is accepted."""
    made = target(kind)
    texts = [tuple(tiny.own_text(made, prompt, LENGTH)) for prompt in PROMPTS]
    examples = [Example(p, t) for p, t in zip(PROMPTS, texts, strict=True)]
    drafter = tiny.trained_drafter(made, examples, steps=60)
    results = moaspec.generate(
        made, PROMPTS, drafter=drafter, max_new_tokens=LENGTH, tree=moaspec.Chain(3)
    )
    assert [tuple(result.token_ids) for result in results] == texts
    assert max(result.tau or 0 for result in results) > 1
