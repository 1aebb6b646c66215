"""Losses against closed forms, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bits import needs_kernels
from moaspec_train.students.losses import (
    Divergence,
    ExitStates,
    LossSums,
    LossWeights,
    distil,
    divergence,
    exit_loss,
    fast_distil,
    feature_loss,
    summary_loss,
)


def test_feature_loss_by_hand() -> None:
    drafted = torch.tensor([[0.5, -3.0], [0.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    loss = feature_loss(drafted, target)
    # Below 1: d^2 / 2; from 1 on: |d| - 1/2. Mean over the two numbers of a state, then a sum.
    assert loss.item() == pytest.approx((0.125 + 2.5) / 2 + (0 + 0.5) / 2)
    loss.backward()
    assert drafted.grad is not None
    assert_close(drafted.grad, torch.tensor([[0.5, -1.0], [0.0, -1.0]]) / 2)


def test_forward_kl_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]), torch.tensor([[0.2, 0.4, 0.4]] * 2)
    loss_M, gradient = divergence(q.log() + 3, p.log() - 1)
    by_hand = sum(
        pi * math.log(pi / qi)
        for row_p, row_q in zip(p.tolist(), q.tolist(), strict=True)
        for pi, qi in zip(row_p, row_q, strict=True)
    )
    assert loss_M.sum().item() == pytest.approx(by_hand)
    assert_close(gradient, q - p)
    assert divergence(p.log(), p.log())[0].sum().item() == pytest.approx(0, abs=1e-6)


def states(seed: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))


def eager_kl(drafted_MV: Tensor, target_MV: Tensor) -> Tensor:
    """Summed over queries, with PyTorch's own gradient."""
    log_q, log_p = drafted_MV.log_softmax(-1), target_MV.log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def run(chunk: int, weights: LossWeights) -> tuple[LossSums, Tensor]:
    torch.manual_seed(0)
    head, body = nn.Linear(4, 5).requires_grad_(False), nn.Linear(4, 4)
    found = ExitStates(body(states(1)), states(2), head)
    proxy, sums = exit_loss(found, weights, scale=1 / 7, chunk=chunk)
    parts = LossSums(*sums.tolist())
    proxy.backward()
    assert body.weight.grad is not None
    assert head.weight.grad is None
    return parts, body.weight.grad


WEIGHTS = LossWeights(feature=0.7, kl=0.3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7, 512])
def test_chunks_change_neither_value_nor_gradient(chunk: int) -> None:
    torch.manual_seed(0)
    head, body = nn.Linear(4, 5).requires_grad_(False), nn.Linear(4, 4)
    drafted, target = body(states(1)), states(2)
    feature = feature_loss(drafted, target)
    kl = eager_kl(head(drafted), head(target))
    total = 0.7 * feature + 0.3 * kl
    (total / 7).backward()
    parts, gradient = run(chunk, WEIGHTS)
    assert parts.total == pytest.approx(total.item(), rel=1e-5)
    assert parts.feature == pytest.approx(feature.item(), rel=1e-5)
    assert parts.kl == pytest.approx(kl.item(), rel=1e-5)
    assert parts.count == 7
    assert parts.hits == int((head(drafted).argmax(-1) == head(target).argmax(-1)).sum())
    assert_close(gradient, body.weight.grad)


@pytest.mark.parametrize("weights", [LossWeights(kl=0.0), LossWeights(feature=0.0, kl=1.0)])
def test_a_weight_of_zero_leaves_one_loss(weights: LossWeights) -> None:
    parts, gradient = run(3, weights)
    assert parts.total == pytest.approx(weights.feature * parts.feature + weights.kl * parts.kl)
    assert bool(gradient.any())


P, Q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.2, 0.4, 0.4]])
SIGN = (Q - P).sign() / 2
OF_VARIATION = Q * (SIGN - (Q * SIGN).sum())
"""The gradient of half of sum |p - q|, which is one minus the acceptance, by the logits of q."""


def test_drafts_that_are_never_accepted_have_a_finite_loss() -> None:
    logits = torch.tensor([[99.0, -99.0]])
    loss, gradient = divergence(logits, -logits, "hybrid")
    assert bool(loss.isfinite().all())
    assert bool(gradient.isfinite().all())


def test_hybrid_by_hand() -> None:
    """At an acceptance of 0.7 KL has the share exp(-2.1), which has no gradient."""
    share = math.exp(-3 * 0.7)
    (loss,), gradient = divergence(Q.log() + 3, P.log() - 1, "hybrid")
    assert loss.item() == pytest.approx(
        share * float((P * (P / Q).log()).sum()) + (1 - share) * 0.3
    )
    assert_close(gradient, share * (Q - P) + (1 - share) * OF_VARIATION)


def test_relative_features_do_not_depend_on_size() -> None:
    """What tells exits apart whose states differ by tens in size."""
    small = feature_loss(states(1), states(2), relative=True)
    assert_close(feature_loss(30 * states(1), 30 * states(2), relative=True), small)


def test_the_inner_states_share_the_feature_loss() -> None:
    drafted, target = states(1).requires_grad_(), states(2)
    inner = (states(3).requires_grad_(), states(4))
    head = nn.Linear(4, 5).requires_grad_(False)
    found = ExitStates(drafted, target, head, inner=inner)
    proxy, sums = exit_loss(found, LossWeights(feature=0.8, kl=0.0), scale=0.5)
    parts = LossSums(*sums.tolist())
    proxy.backward()
    expected = 0.5 * (feature_loss(drafted, target) + feature_loss(*inner))
    assert parts.feature == pytest.approx(expected.item(), rel=1e-5)
    assert parts.total == pytest.approx(0.8 * expected.item(), rel=1e-5)
    gradients = torch.autograd.grad(0.5 * 0.8 * expected, (drafted, inner[0]))
    assert drafted.grad is not None
    assert inner[0].grad is not None
    assert_close(drafted.grad, gradients[0])
    assert_close(inner[0].grad, gradients[1])


def test_the_summary_loss_by_hand() -> None:
    aggregate_TE, target_TE = torch.tensor([[0.5, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    assert_close(summary_loss(aggregate_TE, target_TE), torch.tensor((0.125 + 2.5) / 2))


def test_no_queries_give_no_loss_and_zero_gradients() -> None:
    """A process whose rows have run out takes part all the same."""
    drafted = states(1).requires_grad_()
    head = nn.Linear(4, 5).requires_grad_(False)
    none = torch.zeros(7, dtype=torch.bool)
    empty = ExitStates(drafted[none], states(2)[none], head)
    proxy, sums = exit_loss(empty, WEIGHTS, scale=1.0)
    proxy.backward()
    assert not sums.any()
    assert drafted.grad is not None
    assert not drafted.grad.any()


def test_queries_that_cannot_be_drafted_have_no_divergence() -> None:
    """Their features count, and their drafts are no hits."""
    head = nn.Linear(4, 5).requires_grad_(False)
    draftable = torch.tensor([True, False, True, True, False, True, False])
    drafted, target = states(1).requires_grad_(), states(2)
    some = ExitStates(drafted, target, head, draftable_M=draftable)
    proxy, sums = exit_loss(some, WEIGHTS, scale=1.0, chunk=3)
    proxy.backward()
    of_some = eager_kl(head(drafted)[draftable], head(target)[draftable])
    total = WEIGHTS.feature * feature_loss(drafted, target) + WEIGHTS.kl * of_some
    (gradient,) = torch.autograd.grad(total, drafted)
    assert drafted.grad is not None
    assert_close(drafted.grad, gradient)
    parts = LossSums(*sums.tolist())
    assert parts.kl == pytest.approx(of_some.item(), rel=1e-5)
    hits = (head(drafted).argmax(-1) == head(target).argmax(-1)) & draftable
    assert (parts.hits, parts.count) == (int(hits.sum()), 7)


KINDS: tuple[Divergence, ...] = ("forward_kl", "hybrid")


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_loss_is_the_same(kind: Divergence) -> None:
    """In one graph, whatever the number of queries: what a GPU runs."""
    graphs: list[int] = []

    def traced(function: Any, *, dynamic: bool) -> Any:
        def backend(graph: Any, _: Any) -> Any:
            graphs.append(1)
            return graph.forward

        torch._dynamo.reset()
        return torch.compile(function, dynamic=dynamic, backend=backend, fullgraph=True)

    compiled = fast_distil(torch.device("cuda"), traced)
    for queries in (5, 7, 3):
        drafted, target = (3 * states(i).repeat(1, 9)[:queries].bfloat16() for i in (1, 2))
        factor = torch.rand(queries)
        expected = distil(drafted, target, factor, kind)
        assert_close(compiled(drafted, target, factor, kind), expected)
    assert len(graphs) == 1


@needs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 5, 16, 37, 1000])
def test_a_kernel_has_the_same_loss(vocabulary: int, dtype: torch.dtype) -> None:
    """Also where logits are far apart, and where two are the largest."""
    made = torch.Generator().manual_seed(0)
    for scale in (0.1, 3.0, 40.0):
        target, drafted = (
            (scale * torch.randn(9, vocabulary, generator=made)).to(dtype) for _ in range(2)
        )
        drafted[0], target[0, vocabulary // 2] = target[0], target[0].max()
        factor = torch.rand(9, generator=made)
        expected = distil(drafted, target, factor, "forward_kl")
        found = fast_distil(torch.device("cpu"))(drafted, target.clone(), factor, "forward_kl")
        # Numbers of bf16 have eight bits; sums in float32 accumulate in another order.
        assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[1], expected[1])
        assert_close(
            found[2], expected[2], rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


@needs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_kernel_shows_logits_that_are_not_finite(wrong: float) -> None:
    """So a step of such a batch is skipped."""
    for place in range(2):
        for at in (0, 17, 39):
            drafted, target = torch.randn(2, 40), torch.randn(2, 40)
            (drafted, target)[place][1, at] = wrong
            by_kernel = fast_distil(torch.device("cpu"))
            value, *_ = by_kernel(drafted, target, torch.ones(2), "forward_kl")
            assert value.isfinite().tolist() == [True, False]
