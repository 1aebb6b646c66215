"""The target's embedding of a few tokens, without what vLLM's modules do around a plain look-up.

Legend: N tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]
"""ids, (N,) -> (N, E)."""
PROBED = 8
"""Tokens by which a look-up is compared with the target's own embedding."""


def embedding_of(target: nn.Module, own: Embed, kind: type[nn.Module]) -> Embed:
    """How to embed tokens as the target does.

    Args:
        target: vLLM's model, its weights loaded.
        own: its own embedding, which is the answer wherever it is more than one look-up: with
            several ranks, scaled, quantised, or wrapped.
        kind: the class of vLLM's embedding modules.
    """
    tables = [module for module in target.modules() if type(module) is kind]
    if len(tables) != 1 or tables[0].tp_size != 1:
        return own
    table: Any = tables[0]
    ids_N = torch.arange(min(PROBED, len(table.weight)), device=table.weight.device)

    def look_up(ids_N: Tensor) -> Tensor:
        return F.embedding(ids_N, table.weight)

    return look_up if torch.equal(look_up(ids_N), own(ids_N)) else own
