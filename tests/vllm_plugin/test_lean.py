"""The halves in few calls against the modules whose weights they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from moaspec.model import MoADrafter
from moaspec.model.layers import masked_attention

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = pytest.mark.filterwarnings("default")  # of libraries that vLLM imports

POSITIONS, TOKENS = 64, 11
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
"""Float32, summed in another order."""


@pytest.fixture(params=[(), ("lsa",), ("sa",)], ids=["whole", "no LSA", "no SA"])
def drafter(request: pytest.FixtureRequest) -> MoADrafter:
    drafter = tiny.random_drafter(tiny.target(), without=request.param)
    generator = torch.Generator().manual_seed(0)
    for name, weight in drafter.named_parameters():  # norms and biases of a new drafter say nothing
        if "norm" in name or name.endswith("bias"):
            weight.data = 1 + 0.3 * torch.randn(weight.shape, generator=generator)
    return drafter


def states(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_head(x_1HTD: Tensor) -> Tensor:
    return x_1HTD[0].transpose(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 12, 2048])
def test_encoding(drafter: MoADrafter, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from moaspec.vllm_plugin import lean

    monkeypatch.setattr(lean, "CACHED_ROWS", rows)
    layers = tiny.target().model.config.num_hidden_layers
    kv_NLK = states(TOKENS, layers, drafter.config.kv_size, seed=1)
    position_N = torch.arange(7, 7 + TOKENS)
    expected = drafter.project_kv(drafter.aggregate(kv_NLK[None]), position_N[None])
    encoder = lean.LeanEncoder(drafter, num_layers=layers, positions=POSITIONS)
    for got, one in zip(encoder.memory(kv_NLK, position_N), expected, strict=True):
        torch.testing.assert_close(got, by_head(one), **CLOSE)


@torch.no_grad()
def test_what_a_text_leaves(drafter: MoADrafter) -> None:
    from moaspec.vllm_plugin.lean import LeanSpeaker

    embeddings_NE, position_N = states(TOKENS, drafter.config.hidden_size, seed=2), torch.arange(11)
    expected = drafter.speaker.remember_text(embeddings_NE[None], position_N[None])
    speaker = LeanSpeaker(drafter, positions=POSITIONS)
    for got, one in zip(speaker.remember(embeddings_NE, position_N), expected, strict=True):
        torch.testing.assert_close(got, by_head(one), **CLOSE)


@torch.no_grad()
def test_a_draft_step(drafter: MoADrafter) -> None:
    from moaspec.vllm_plugin.lean import LeanSpeaker

    ca = drafter.config.cross_attention
    memory = [states(1, ca.num_kv_heads, 5, ca.head_dim, seed=seed) for seed in (3, 4)]
    embeddings_NE, position_N = states(TOKENS, drafter.config.hidden_size, seed=5), torch.arange(11)
    x_1NE = embeddings_NE[None]
    x_1NE = drafter.speaker.read_text(x_1NE, position_N[None], masked_attention)
    expected_1NE = drafter.speaker.read_memory(
        x_1NE, position_N[None], lambda query: masked_attention(query, *memory)
    )

    def attend(*heads: Tensor) -> Tensor:
        return by_head(masked_attention(*(x.transpose(0, 1)[None] for x in heads))).flatten(1)

    def ask(query_NHD: Tensor) -> Tensor:
        query_1HND = query_NHD.transpose(0, 1)[None]
        return by_head(masked_attention(query_1HND, *memory)).flatten(1)

    speaker = LeanSpeaker(drafter, positions=POSITIONS)
    got_NE = speaker.read(embeddings_NE, position_N, attend, ask)
    torch.testing.assert_close(got_NE, expected_1NE[0], **CLOSE)
