"""T-step bounded blocks, which define the activations that each training query may read.

Legend: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moaspec.train.dataset.examples import Batch


@dataclass(frozen=True)
class Blocks:
    """A partition of every response into blocks, per query.

    Attributes:
        block_start_BT: s(i), the last position whose activations query i may read. In a block that
            begins at b it is b - 1, because the newest token has no activations when a round
            starts. Tokens outside the responses are verified: s(i) = i.
        step_BT: index of the draft of query i in its round, from 0.
        loss_BT: bool, queries with loss: response tokens that are followed by another one.
    """

    block_start_BT: Tensor
    step_BT: Tensor
    loss_BT: Tensor

    def to(self, device: torch.device) -> Blocks:
        return Blocks(*(x.to(device) for x in (self.block_start_BT, self.step_BT, self.loss_BT)))


def random_blocks(
    batch: Batch, *, shortest: int, longest: int, generator: torch.Generator
) -> Blocks:
    """Draw block lengths uniformly from shortest..longest (the paper: 5..15).

    Source: arXiv 2410.03804, section 4.2 and appendix (training with T-step bounded masks).
    """
    rows = batch.input_ids_BT.shape[0]
    num = batch.input_ids_BT.shape[1] // shortest + 1
    lengths = torch.randint(shortest, longest + 1, (rows, num), generator=generator)
    # The first block is shortened randomly, so that block borders can be anywhere.
    lengths[:, 0] = (lengths[:, 0] * torch.rand(rows, generator=generator)).long() + 1
    return _partition(batch, lengths.cumsum(1))


def fixed_blocks(batch: Batch, length: int) -> Blocks:
    """Cut responses into blocks of one length, for evaluation."""
    rows, tokens = batch.input_ids_BT.shape
    return _partition(batch, torch.arange(length, tokens + length, length).expand(rows, -1))


def _partition(batch: Batch, ends_BN: Tensor) -> Blocks:
    """Cut every response at its row's cumulative block lengths `ends_BN`."""
    rows, tokens = batch.input_ids_BT.shape
    index_BT = torch.arange(tokens).expand(rows, tokens)
    response_BT = batch.response_BT
    offset_BT = index_BT - _response_start(response_BT)
    starts_BN = torch.cat((torch.zeros(rows, 1, dtype=torch.long), ends_BN), dim=1)
    which = torch.searchsorted(starts_BN, offset_BT, right=True) - 1
    step_BT = offset_BT - starts_BN.gather(1, which)
    block_start_BT = torch.where(response_BT, index_BT - step_BT - 1, index_BT)
    followed_BT = torch.nn.functional.pad(response_BT[:, 1:], (0, 1))
    return Blocks(block_start_BT.clamp(min=0), step_BT, response_BT & followed_BT)


def _response_start(response_BT: Tensor) -> Tensor:
    """Start of the response of each token, or of the last response before it."""
    index_BT = torch.arange(response_BT.shape[1], device=response_BT.device)
    before_BT = torch.nn.functional.pad(response_BT[:, :-1], (1, 0))
    return torch.where(response_BT & ~before_BT, index_BT, 0).cummax(1)[0]
