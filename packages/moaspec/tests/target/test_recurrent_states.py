"""States of a pass: each token starts from the state behind the token before it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from moaspec.target.generic.recurrent_states import MixerCache, StepPass, StepRow, num_bytes

LAYER = 3


class RunningSum:
    """A layer whose output is the sum of all inputs so far; it changes its state."""

    def read(self, hidden_BTE: Tensor, cache: MixerCache) -> Tensor:
        return self.leave(self.step(self.enter(hidden_BTE), cache))

    def enter(self, hidden_N1E: Tensor) -> Tensor:
        return 2 * hidden_N1E

    def step(self, entered_N1F: Tensor, cache: MixerCache) -> Tensor:
        held = cache.get_recurrent_state(LAYER)
        if held is None:
            held = cache.update_recurrent_state(torch.zeros_like(entered_N1F[:, 0]), LAYER)
        stepped_N1G = held[:, None] + entered_N1F.cumsum(1)
        held += entered_N1F.sum(1)
        return stepped_N1G

    def leave(self, stepped_N1G: Tensor) -> Tensor:
        return stepped_N1G / 2


def run(rows: list[StepRow], numbers: list[list[float]]) -> tuple[StepPass, list[list[float]]]:
    steps = StepPass(rows)
    output_BTE = steps.run(LAYER, cast(Any, RunningSum()), torch.tensor(numbers)[..., None])
    return steps, output_BTE[..., 0].tolist()


def state(number: float) -> dict[int, Any]:
    return {LAYER: {("recurrent", 0): torch.tensor([[2 * number]])}}


def value(steps: StepPass, row: int, token: int) -> float:
    return float(steps.after(row, token)[LAYER]["recurrent", 0]) / 2


def test_branches_have_states_of_their_own() -> None:
    before = state(100.0)
    steps, outputs = run([StepRow(0, (-1, 0, 0, 1, 2), before)], [[1.0, 10.0, 20.0, 2.0, 3.0]])
    assert outputs == [[101.0, 111.0, 121.0, 113.0, 124.0]]
    assert [value(steps, 0, token) for token in range(5)] == outputs[0]
    assert float(before[LAYER]["recurrent", 0]) == 200.0  # as it was


def test_rows_read_and_step_together_and_pads_are_skipped() -> None:
    rows = [StepRow(2, (1, 1), {}), StepRow(0, (-1,), state(50.0)), StepRow(3, (), {})]
    numbers = [[1.0, 2.0, 3.0, 4.0], [5.0, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 9.0]]
    steps, outputs = run(rows, numbers)
    assert outputs == [[1.0, 3.0, 6.0, 7.0], [55.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 0.0]]
    assert value(steps, 0, 1) == 3.0
    assert value(steps, 1, 0) == 55.0
    assert value(steps, 2, 2) == 3.0


def test_states_after_a_token_are_tensors_of_their_own() -> None:
    steps, _ = run([StepRow(1, (0, 0), {})], [[1.0, 2.0, 3.0]])
    kept = steps.after(0, 1)
    kept[LAYER]["recurrent", 0].zero_()
    assert value(steps, 0, 1) == 3.0
    assert num_bytes(kept) == 4


def test_convolution_keeps_its_last_inputs() -> None:
    cache = MixerCache({})
    assert cache.get_conv_state(LAYER) is None
    assert not cache.has_previous_state(LAYER)
    first = cache.update_conv_state(torch.tensor([[[1.0, 2.0]]]), LAYER, conv_kernel_size=3)
    assert first.tolist() == [[[0.0, 1.0, 2.0]]]  # zeros before the text
    both = cache.update_conv_state(torch.tensor([[[3.0, 4.0]]]), LAYER, conv_kernel_size=3)
    assert both.tolist() == [[[0.0, 1.0, 2.0, 3.0, 4.0]]]
    held = cache.get_conv_state(LAYER)
    assert held is not None
    assert held.tolist() == [[[2.0, 3.0, 4.0]]]
    assert cache.has_previous_state(LAYER)
