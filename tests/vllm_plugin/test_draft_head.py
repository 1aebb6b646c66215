"""Draft tokens out of a head that one or several ranks hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bits import needs_kernels
from moaspec.vllm_plugin.draft_head import TrimmedHead

VOCAB, WIDTH = 20, 8
IDS = torch.tensor([3, 17, 4, 9])


def shard(weight_VE: Tensor, start: int, stop: int) -> Any:
    """A rank's rows, padded as vLLM pads them."""
    rows = torch.cat((weight_VE[start:stop], torch.full((2, WIDTH), 99.0)))
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    return SimpleNamespace(weight=rows, shard_indices=indices)


def model(weight_VE: Tensor) -> Any:
    """A target whose own head answers."""
    return SimpleNamespace(compute_logits=lambda states: states @ weight_VE.T)


def test_trimmed_heads_choose_what_the_whole_head_would_among_their_tokens() -> None:
    torch.manual_seed(0)
    weight_VE, states_TE = torch.randn(VOCAB, WIDTH), torch.randn(50, WIDTH)
    expected = IDS[(states_TE @ weight_VE.T)[:, IDS].argmax(-1)]
    targets = [model(weight_VE), model(weight_VE)]
    targets[0].lm_head, targets[1].lm_head = shard(weight_VE, 0, 11), shard(weight_VE, 11, VOCAB)
    parts: list[Tensor] = []
    for target in targets:
        TrimmedHead(target, IDS, lambda rows: parts.append(rows) or rows)  # type: ignore[func-returns-value]
    for target in targets:
        head = TrimmedHead(target, IDS, lambda _: parts[0] + parts[1])
        assert torch.equal(head.best(states_TE), expected)


def test_other_heads_answer_through_the_target() -> None:
    torch.manual_seed(1)
    weight_VE, states_TE = torch.randn(VOCAB, WIDTH), torch.randn(50, WIDTH)
    target = model(weight_VE)
    logits = states_TE @ weight_VE.T
    assert torch.equal(TrimmedHead(target, None, torch.clone).best(states_TE), logits.argmax(-1))
    target.lm_head = SimpleNamespace(weight=weight_VE.to(torch.int8))  # quantised
    trimmed = TrimmedHead(target, IDS, torch.clone).best(states_TE)
    assert torch.equal(trimmed, IDS[logits[:, IDS].argmax(-1)])


@needs_kernels
def test_sums_are_compared_before_they_are_rounded() -> None:
    """256 and 256.5 are one number in bf16, of which the first would be taken."""
    weight_VE = torch.zeros(VOCAB, WIDTH)
    weight_VE[17, 0], weight_VE[9, :2] = 256.0, torch.tensor([256.0, 1.0])
    states_TE = torch.tensor([[1.0, 0.5] + [0.0] * (WIDTH - 2)]).bfloat16()
    target = SimpleNamespace(lm_head=shard(weight_VE, 0, VOCAB))
    target.lm_head.weight = target.lm_head.weight.bfloat16()
    assert TrimmedHead(target, IDS, torch.clone).best(states_TE).tolist() == [9]
