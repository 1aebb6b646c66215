"""The training pass: who reads what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tiny
from block_drafts import block_logits
from moaspec.model.moa import MoADrafter, Queries, TargetPass

IDS = torch.tensor([[3, 7, 1, 9, 30, 2, 2, 8]])
START = torch.tensor([[0, 1, 2, 2, 2, 2, 5, 5]])
"""Blocks {3, 4, 5} and {6, 7} after three tokens of prompt."""


def logits(ids: Tensor, layers: int, *, start: Tensor = START, pads: int = 0) -> Tensor:
    mask = torch.ones_like(ids)
    mask[:, ids.shape[1] - pads :] = 0
    drafter = tiny.random_drafter(tiny.target())
    return block_logits(drafter, tiny.target(), ids, mask, start, num_target_layers=layers)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_a_block_is_what_is_drafted_when_it_begins(layers: int) -> None:
    """Query i of a block computes what it computes when its block is the only one."""
    whole = logits(IDS, layers)
    for last in range(3, 8):
        first = int(START[0, last])
        alone = torch.arange(last + 1).clamp(max=first)[None]
        got = logits(IDS[:, : last + 1], layers, start=alone)
        assert_close(got[0, -1], whole[0, last], **tiny.TOLERANCE)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_pads_change_nothing(layers: int) -> None:
    padded = torch.cat((IDS, torch.tensor([[63, 62]])), dim=1)
    start = torch.cat((START, torch.tensor([[5, 5]])), dim=1)
    got = logits(padded, layers, start=start, pads=2)
    assert_close(got[:, :8], logits(IDS, layers), **tiny.TOLERANCE)


@dataclass
class GivenTarget:
    """A target with given embeddings, keys and values, whose head shows the states."""

    embeddings_BTE: Tensor
    kv_BTLK: Tensor

    def embed(self, _ids_BT: Tensor) -> Tensor:
        return self.embeddings_BTE

    def capture(self, _ids_BT: Tensor, _mask_BT: Tensor) -> TargetPass:
        return TargetPass(self.kv_BTLK, self.embeddings_BTE)

    def head(self, states_BTE: Tensor, _token_ids: Tensor | None = None) -> Tensor:
        return states_BTE


def given_states(
    embeddings_BTE: Tensor, kv_BTLK: Tensor, staircase_B: Tensor | None = None
) -> Tensor:
    rows = len(embeddings_BTE)
    ids, start = IDS.expand(rows, -1), START.expand(rows, -1)
    given: Any = GivenTarget(embeddings_BTE, kv_BTLK)
    drafter = tiny.random_drafter(tiny.target())
    return block_logits(drafter, given, ids, torch.ones_like(ids), start, staircase_B=staircase_B)


def test_activations_after_the_block_start_are_not_read() -> None:
    embeddings, kv = tiny.target().embed(IDS), torch.randn(1, 8, 3, 32)
    changed = kv.clone()
    changed[:, 3:] += 1
    before, after = given_states(embeddings, kv), given_states(embeddings, changed)
    assert_close(after[:, :6], before[:, :6], rtol=0, atol=0)
    assert not torch.allclose(after[:, 6], before[:, 6], atol=1e-3)


def test_staircase_hides_earlier_text_from_the_chosen_rows() -> None:
    embeddings = tiny.target().embed(IDS.expand(2, -1))
    kv = torch.randn(1, 8, 3, 32).expand(2, -1, -1, -1)
    changed = embeddings.clone()
    changed[:, 0] += 1
    chosen = torch.tensor([True, False])
    before = given_states(embeddings, kv, staircase_B=chosen)
    after = given_states(changed, kv, staircase_B=chosen)
    assert_close(after[0, 3:], before[0, 3:], rtol=0, atol=0)
    assert not torch.allclose(after[1, 3:], before[1, 3:], atol=1e-3)
    assert_close(before[1], given_states(embeddings, kv)[1], **tiny.TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize(
    "sizes", [{}, {"sa_layers": 2}, {"without": ("sa",)}, {"without": ("ca",)}], ids=str
)
def test_states_of_some_tokens(family: str, sizes: dict[str, Any]) -> None:
    """States and gradients are those of a pass over all tokens, whichever are wanted."""
    torch.manual_seed(0)
    target = tiny.target(family)
    drafter = tiny.random_drafter(target, **sizes).requires_grad_()
    if "sa_layers" in sizes:
        nn.init.normal_(drafter.decoder.text_layers[1].mlp.down_proj.weight, std=0.3)
    ids, start = torch.cat((IDS, IDS.flip(1))), START.expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    result = target.capture(ids, mask)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    wanted[0, 3:], wanted[1, 4:6] = True, True
    gradients = []
    for chosen in (None, wanted, wanted & False):
        drafter.zero_grad()
        _, states = drafter(
            target.embed(ids),
            result.kv_BTLK,
            mask,
            start,
            staircase_B=torch.tensor([True, False]),
            wanted=None if chosen is None else Queries.chosen(chosen),
        )
        states = states[wanted] if chosen is None else states
        if chosen is not None and not chosen.any():
            assert states.shape == (0, 48)
            continue
        (states * torch.arange(1.0, 8.0)[:, None]).sum().backward()
        found = {name: one.grad for name, one in drafter.named_parameters() if one.grad is not None}
        gradients.append({"states": states.detach(), **found})
    whole, some = gradients
    assert whole.keys() == some.keys()
    for name, tensor in whole.items():
        assert_close(some[name], tensor, **tiny.TOLERANCE, msg=name)


def test_trimmed_vocabulary_leaves_other_tokens_impossible() -> None:
    kept = torch.tensor([2, 5, 40])
    target = tiny.target()
    trimmed = tiny.random_drafter(target, draft_token_ids=kept)
    got = block_logits(trimmed, target, IDS, torch.ones_like(IDS), START)
    assert_close(got[..., kept], logits(IDS, 0)[..., kept], **tiny.TOLERANCE)
    outside = torch.ones(64, dtype=torch.bool)
    outside[kept] = False
    assert bool(got[..., outside].eq(float("-inf")).all())


def test_ca_normalises_queries_and_keys_with_one_weight() -> None:
    drafter = tiny.random_drafter(tiny.target())
    assert drafter.encoder.memory_norm is drafter.decoder.cross_attention.input_layernorm
    assert drafter.num_parameters == sum({id(p): p.numel() for p in drafter.parameters()}.values())


@pytest.mark.parametrize("layers", [0, 2])
def test_only_the_drafter_learns(layers: int) -> None:
    target = tiny.target()
    drafter: MoADrafter = tiny.random_drafter(target).requires_grad_(True)
    logits = block_logits(
        drafter, target, IDS, torch.ones_like(IDS), START, num_target_layers=layers
    )
    logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in drafter.parameters())
    assert all(p.grad is None for p in target.model.parameters())
