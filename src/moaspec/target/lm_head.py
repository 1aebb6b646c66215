"""The target's LM head.

Legend: N states, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LMHead:
    """Logits in float32, soft-capped where the model's are.

    Args:
        linear: transformers' LM head.
        cap: of the logits, or None.
    """

    def __init__(self, linear: nn.Module, cap: float | None) -> None:
        self.linear, self.cap = linear, cap

    def rows(self, token_ids: Tensor) -> nn.Linear:
        """The head for these ids alone, a copy."""
        linear: Any = self.linear
        weight, bias = linear.weight[token_ids], linear.bias
        with torch.device("meta"):
            rows = nn.Linear(weight.shape[1], len(token_ids), bias=bias is not None)
        rows.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            rows.bias = nn.Parameter(bias[token_ids], requires_grad=False)
        return rows

    def select(self, token_ids: Tensor | None) -> nn.Module:
        """The head for these ids, a copy; for None the whole one, without a copy."""
        return self.linear if token_ids is None else self.rows(token_ids)

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits by the whole head, or by some of its rows."""
        logits = head(states).float()
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def best(self, states_NE: Tensor) -> Tensor:
        """The ids of the largest logits, (N,) int64."""
        return self.logits(states_NE, self.select(None)).argmax(-1)
