"""A new drafter's first distributions, for every family, and what is left of the start later."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import moaspec
import tiny
from moaspec.model.layers import DecoderLayer
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_train.dataset.examples import Example
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.losses import LossWeights
from moaspec_train.students.warm_start import fit_mlp
from moaspec_train.trainer import Trainer

STEPS = 20
EXAMPLES = 32


def tied_target(family: str) -> Target:
    """One whose head is the table of embeddings; Gemma scales what comes out of it."""
    uncapped: dict[str, Any] = {"final_logit_softcapping": None}
    changes = uncapped if family == "gemma3_text" else {}
    return tiny.fresh_target(
        family, seed=3, initializer_range=0.15, tie_word_embeddings=True, **changes
    )


def sampled_examples(target: Target) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(tiny.VOCAB, (EXAMPLES, 4), generator=generator).tolist()
    results = moaspec.generate(target, prompts, max_new_tokens=26, temperature=1.0, seed=1)
    return [Example(p, result.token_ids) for p, result in zip(prompts, results, strict=True)]


def first_and_last_kl(run: Trainer) -> tuple[float, float]:
    """Of all examples before the first step, and of those of the last one."""
    parts = [run.train_step() for _ in range(STEPS)]
    return parts[0].kl / parts[0].count, parts[-1].kl / parts[-1].count


def kl_of_uniform(target: Target, examples: list[Example]) -> float:
    """KL(p || uniform) = log V - entropy, the mean over the queries with loss."""
    found = []
    for example in examples:
        ids = torch.tensor([example.token_ids])
        states = target.capture(ids, torch.ones_like(ids)).hidden_BTE[0]
        log_p = target.head(states[len(example.prompt_ids) : -1]).log_softmax(-1)
        found += ((log_p.exp() * log_p).sum(-1) + math.log(tiny.VOCAB)).tolist()
    return sum(found) / len(found)


def kl_of_both_starts(
    target: Target, examples: list[Example], output: Path, **changes: Any
) -> dict[bool, tuple[float, float]]:
    """First and last KL with the warm start and with random weights."""
    found = {}
    for warm in (True, False):
        config = TrainConfig(
            target="tiny",
            data=("unused",),
            output=str(output / str(warm)),
            held_out=0,
            batch_size=EXAMPLES,
            steps=400,
            warmup_steps=5,
            learning_rate=2e-3,
            activation_cache=False,
            loss=LossWeights(feature=0.1, kl=1.0),
            warm_start=warm,
            **changes,
        )
        found[warm] = first_and_last_kl(Trainer(target, examples, config))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers"),
    [*((family, (0,)) for family in tiny.FAMILIES), ("llama", (0, 1)), ("gemma3_text", (0, 1))],
    ids=str,
)
def test_the_warm_start_of_every_family(
    family: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """The first KL is below that of equal probabilities; 20 steps later it is still ahead."""
    target = tied_target(family)
    examples = sampled_examples(target)
    found = kl_of_both_starts(target, examples, tmp_path, num_target_layers=layers)
    assert found[True][0] < kl_of_uniform(target, examples)
    assert found[True][1] < found[False][1]


def target_with_massive_dimensions(family: str) -> Target:
    """One whose first layer returns a few large dimensions, which all later norms remove."""
    target = tied_target(family)
    base: Any = target.model.base_model
    few, size = torch.arange(8), 600.0
    with torch.no_grad():
        down = base.layers[0].mlp.down_proj.weight
        down[few] *= size / down[few].norm(dim=1, keepdim=True)
        ids = torch.tensor([tiny.PROMPTS[0]])
        seen = target.capture(ids, torch.ones_like(ids), before=(target.num_layers - 1,))
        states_E = seen.before[target.num_layers - 1][0].square().mean(0).sqrt()
        large = states_E.square().mean().sqrt() / states_E.median()
        for layer in base.layers[1:]:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight *= large
                norm.weight[few] = 0
        base.norm.weight[few] = 0
        hidden = target.capture(ids, torch.ones_like(ids)).hidden_BTE
        base.norm.weight *= 2 / hidden.square().mean().sqrt()
    return target


@pytest.mark.slow
def test_massive_dimensions_of_the_first_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of that layer would fill CA's norms with them: KL began at 172, and ended at 4."""
    target = target_with_massive_dimensions("llama")
    examples = sampled_examples(target)
    found = kl_of_both_starts(target, examples, tmp_path)
    assert "massive dimensions" in caplog.text
    # The sample of this tiny model tells little: the drafter begins at equal probabilities.
    assert found[True][0] < 1.1 * kl_of_uniform(target, examples)
    assert found[True][1] < found[False][1]


def test_a_fitted_mlp_subtracts_the_residual_and_adds_what_is_wanted() -> None:
    torch.manual_seed(0)
    config = LayerConfig(
        hidden_size=24, num_heads=2, num_kv_heads=2, head_dim=12, intermediate_size=40
    )
    layer = DecoderLayer(config, eps=1e-6, hidden_act="silu")
    middle_NE = 5 * (torch.randn(4000, 24) + 1.5)
    wanted_NE = middle_NE @ torch.randn(24, 24) / 24 + 1
    fit_mlp(layer, middle_NE, wanted_NE)
    with torch.no_grad():
        inner_NI = layer.mlp.inner(layer.post_attention_layernorm, middle_NE)
        found_NE = middle_NE + layer.mlp.down_proj(inner_NI)
    error, before = ((x - wanted_NE).square().mean() for x in (found_NE, middle_NE))
    # Sizes of states, which the norm takes away, and a gate that is not quite constant remain.
    assert error < 0.05 * before


def test_few_queries_use_few_units() -> None:
    torch.manual_seed(0)
    config = LayerConfig(
        hidden_size=24, num_heads=2, num_kv_heads=2, head_dim=12, intermediate_size=40
    )
    layer = DecoderLayer(config, eps=1e-6, hidden_act="silu")
    fit_mlp(layer, torch.randn(20, 24), torch.randn(20, 24))
    used_I = layer.mlp.down_proj.weight.abs().sum(0) > 0
    assert_close(used_I, torch.arange(40) < 5)
