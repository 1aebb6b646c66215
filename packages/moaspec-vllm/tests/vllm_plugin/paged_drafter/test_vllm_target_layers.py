"""Embedding of tokens, and draft tokens from a head that one or several ranks hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bits import needs_kernels
from moaspec_vllm.paged_drafter.vllm_target_layers import DraftHead, embedding_of

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
        DraftHead(target, IDS, lambda rows: parts.append(rows) or rows)  # type: ignore[func-returns-value]
    for target in targets:
        head = DraftHead(target, IDS, lambda _: parts[0] + parts[1])
        assert torch.equal(head.best(states_TE), expected)


def test_other_heads_answer_through_the_target() -> None:
    torch.manual_seed(1)
    weight_VE, states_TE = torch.randn(VOCAB, WIDTH), torch.randn(50, WIDTH)
    target = model(weight_VE)
    logits = states_TE @ weight_VE.T
    assert torch.equal(DraftHead(target, None, torch.clone).best(states_TE), logits.argmax(-1))
    target.lm_head = SimpleNamespace(weight=weight_VE.to(torch.int8))  # quantised
    trimmed = DraftHead(target, IDS, torch.clone).best(states_TE)
    assert torch.equal(trimmed, IDS[logits[:, IDS].argmax(-1)])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ranks_send_their_best_logit_alone_where_that_is_the_targets_choice(sign: float) -> None:
    """`sign`: what the target multiplies the logits with, unknown to vLLM's function."""
    torch.manual_seed(2)
    weight_VE, states_TE = torch.randn(VOCAB, WIDTH), torch.randn(50, WIDTH)
    target, asked = model(sign * weight_VE), list[int]()

    def get_top_tokens(head: Any, states_TE: Tensor) -> Tensor:
        asked.append(len(states_TE))
        return (states_TE @ head.weight.T).argmax(-1)

    target.lm_head = SimpleNamespace(weight=weight_VE, tp_size=2)
    target.logits_processor = SimpleNamespace(get_top_tokens=get_top_tokens)
    head = DraftHead(target, None, torch.clone)
    assert torch.equal(head.best(states_TE), (sign * states_TE @ weight_VE.T).argmax(-1))
    assert (asked[-1] == 50) == (sign > 0)
    target.lm_head.tp_size = 1
    asked.clear()
    DraftHead(target, None, torch.clone).best(states_TE)
    assert asked == []


class Adapted(nn.Module):
    """A LoRA layer of vLLM's, which takes the batch's rows only."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *_: Any) -> Tensor:
        raise AssertionError("an adapter of the batch's requests, applied to drafts")


def test_drafts_leave_out_adapters_of_the_head() -> None:
    torch.manual_seed(0)
    head, states_TE = nn.Linear(WIDTH, VOCAB), torch.randn(50, WIDTH)

    class Processor(nn.Module):
        def forward(self, head: nn.Module, states_TE: Tensor) -> Tensor:
            return head(states_TE)

    target = SimpleNamespace(logits_processor=Adapted(Processor()), lm_head=Adapted(head))
    target.compute_logits = lambda states: target.logits_processor(target.lm_head, states)
    best = DraftHead(target, None, torch.clone).best
    assert torch.equal(best(states_TE), head(states_TE).argmax(-1))
    with pytest.raises(AssertionError, match="applied to drafts"):
        target.compute_logits(states_TE)


@needs_kernels
def test_sums_are_compared_before_they_are_rounded() -> None:
    """256 and 256.5 are equal in bf16, where argmax would take the first."""
    weight_VE = torch.zeros(VOCAB, WIDTH)
    weight_VE[17, 0], weight_VE[9, :2] = 256.0, torch.tensor([256.0, 1.0])
    states_TE = torch.tensor([[1.0, 0.5] + [0.0] * (WIDTH - 2)]).bfloat16()
    target = SimpleNamespace(lm_head=shard(weight_VE, 0, VOCAB))
    target.lm_head.weight = target.lm_head.weight.bfloat16()
    assert DraftHead(target, IDS, torch.clone).best(states_TE).tolist() == [9]


class Table(nn.Embedding):
    """The attributes of vLLM's embedding modules that are read."""

    tp_size = 1


class Sharded(Table):
    """A table with the rows of one rank."""

    tp_size = 2


class Model(nn.Module):
    """A target that embeds with its first table."""

    def __init__(self, *tables: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.tables, self.scale = nn.ModuleList(tables), scale

    def embed_input_ids(self, ids_N: Tensor) -> Tensor:
        embedded_NE: Tensor = self.tables[0](ids_N)
        return embedded_NE * self.scale


@torch.inference_mode()
def test_a_plain_table_is_looked_up() -> None:
    model, ids_N = Model(Table(20, 4)), torch.tensor([3, 19, 0])
    embed = embedding_of(model, model.embed_input_ids, Table)
    assert embed != model.embed_input_ids
    assert torch.equal(embed(ids_N), model.embed_input_ids(ids_N))
    model.tables[0].weight = nn.Parameter(torch.ones(20, 4))  # as when weights are loaded anew
    assert torch.equal(embed(ids_N), torch.ones(3, 4))


@torch.inference_mode()
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_drafts_leave_out_adapters_of_the_embedding(scale: float) -> None:
    table, ids_N = Table(20, 4), torch.tensor([3, 19, 0])
    model = Model(Adapted(table), scale=scale)
    embed = embedding_of(model, model.embed_input_ids, Table)
    assert torch.equal(embed(ids_N), table(ids_N) * scale)


@pytest.mark.parametrize(
    "model",
    [
        Model(Sharded(20, 4)),
        Model(Table(20, 4), scale=2.0),
        Model(Table(20, 4), Table(20, 4)),
        Model(nn.Embedding(20, 4)),
    ],
    ids=["several ranks", "scaled", "two tables", "another module"],
)
@torch.inference_mode()
def test_all_else_is_left_to_the_target(model: Model) -> None:
    kind = type(model.tables[0]) if isinstance(model.tables[0], Table) else Table
    assert embedding_of(model, model.embed_input_ids, kind) == model.embed_input_ids
