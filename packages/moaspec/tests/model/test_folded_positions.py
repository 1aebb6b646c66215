"""Keys turned back are the keys of the positions that they are turned to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tiny
from moaspec.model.layers import FOLD_CHUNK_TOKENS, FoldedPositions, rotate, scaled_rope
from moaspec.model.moa import MoADrafter
from moaspec_core.checkpoint.drafter_config import DrafterConfig
from moaspec_core.errors import ShapeError

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0} | {
    "original_max_position_embeddings": 64
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0},
    **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    **{"original_max_position_embeddings": 64},
}


def config(rope_parameters: dict[str, Any], trained_positions: int = 16) -> DrafterConfig:
    """Of a drafter for the tiny target, which has heads of 8."""
    return dataclasses.replace(
        tiny.random_drafter(tiny.target()).config,
        rope_parameters=rope_parameters,
        trained_positions=trained_positions,
    )


def keys_values(
    made: DrafterConfig, keys_BTLJD: Tensor, values_BTLJD: Tensor, position_ids_BT: Tensor
) -> Tensor:
    """(B, T, L, K) with keys that the target rotated for these positions."""
    rope = scaled_rope(8, made.rope_parameters, made.max_position_embeddings)
    cos, sin = rope.angles(position_ids_BT)
    rotated = rotate(keys_BTLJD, (cos[:, :, None, None], sin[:, :, None, None]))
    return torch.stack((rotated, values_BTLJD), dim=-2).flatten(-3)


@pytest.mark.parametrize(
    "rope_parameters", [tiny.target().config.rope_parameters, YARN, LLAMA3, PARTIAL]
)
@pytest.mark.parametrize("tokens", [1, 60, FOLD_CHUNK_TOKENS + 3])
def test_keys_are_those_of_positions_within_the_period(
    rope_parameters: dict[str, Any], tokens: int
) -> None:
    made = config(rope_parameters)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, tokens, 3, 2, 8)
    positions = torch.stack((torch.arange(tokens), torch.arange(tokens) + 1000))
    folded = FoldedPositions(made)(keys_values(made, keys, values, positions), positions)
    expected = torch.where(positions < 16, positions, 8 + positions % 8)
    assert_close(folded, keys_values(made, keys, values, expected), atol=2e-4, rtol=1e-4)


def test_positions_that_were_trained_stay_as_they_are() -> None:
    kv = torch.randn(1, 16, 3, 32).bfloat16()
    fold = FoldedPositions(config(PARTIAL))
    assert fold(kv, torch.arange(16)[None]) is kv
    later = fold(kv, torch.arange(1, 17)[None])
    assert later.dtype == torch.bfloat16
    assert later[:, :-1].equal(kv[:, :-1])
    assert not later[:, -1].equal(kv[:, -1])


def test_a_drafter_drafts_far_into_a_text_as_at_its_beginning() -> None:
    """LSA says the same of a token at positions p and p + 16, given its unrotated keys."""
    drafter = tiny.random_drafter(tiny.target())
    folding = MoADrafter(dataclasses.replace(drafter.config, trained_positions=16)).eval()
    folding.load_state_dict(drafter.state_dict())
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 5, tiny.target().num_layers, 2, 8)
    near, far = torch.arange(8, 13)[None], torch.arange(24, 29)[None]
    near_kv = keys_values(drafter.config, keys, values, near)
    far_kv = keys_values(drafter.config, keys, values, far)
    expected = drafter.project_kv(drafter.aggregate(near_kv), far)
    assert_close(folding.encode(far_kv, far), expected)
    assert not torch.allclose(drafter.encode(far_kv, far)[1], expected[1], atol=1e-3)


def test_what_cannot_be_turned_back() -> None:
    with pytest.raises(ShapeError, match="LongRoPE"):
        FoldedPositions(config(LONGROPE))
    with pytest.raises(ShapeError, match="needs the sizes of the target"):
        FoldedPositions(dataclasses.replace(config(PARTIAL), target=None))
    for value in (-1, 1.5, "all"):
        with pytest.raises(ShapeError, match=r"trained_positions must be an integer >= 0"):
            config(PARTIAL, value)  # type: ignore[arg-type]
