"""Tokens are embedded by one look-up where that is all the target does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moaspec.vllm_plugin.embedding import embedding_of


class Table(nn.Embedding):
    """What is seen of vLLM's embedding modules."""

    tp_size = 1


class Sharded(Table):
    """One that holds its rank's rows alone."""

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
