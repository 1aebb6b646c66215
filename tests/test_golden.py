"""Parity with the authors' reference, on their own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import golden
import moaspec
from block_drafts import block_logits, last_known
from golden import TOLERANCE, needs_golden
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.model.moa import MoADrafter, positions
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.engine.engine import run_now

pytestmark = needs_golden
PAPER_TREE = moaspec.Tree(depth=6, breadth=8, total_tokens=62)


@pytest.fixture(scope="module")
def target() -> moaspec.Target:
    return golden.target()


def flat_features(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, tokens = batch["input_ids"].shape
    return batch["lsa_in"].unflatten(0, (rows, tokens))


def test_captured_keys_and_values_are_what_layer_self_attention_reads(
    target: moaspec.Target,
) -> None:
    batch = golden.arrays("train_batch.npz")
    result = target.capture(batch["input_ids"], batch["attention_mask"])
    real = batch["attention_mask"].bool()
    assert_close(result.kv_BTLK[real], flat_features(batch)[real], **TOLERANCE)
    assert_close(result.hidden_BTE[real], batch["target_hidden_4"][real], **TOLERANCE)


def test_aggregate(target: moaspec.Target, tmp_path: Path) -> None:
    drafter = golden.drafter(tmp_path, target, "drafter.safetensors")
    batch, expected = golden.arrays("train_batch.npz"), golden.arrays("train_plain_tli0.npz")
    real = batch["attention_mask"].bool()
    states = drafter.aggregate(flat_features(batch))
    assert_close(states[real], expected["ekv2e_out"][real], **TOLERANCE)


@pytest.mark.parametrize("weights", ["random", "trained"])
def test_memory_of_a_prompt(target: moaspec.Target, tmp_path: Path, weights: str) -> None:
    name = "drafter.safetensors" if weights == "random" else "drafter_trained.safetensors"
    drafter = golden.drafter(tmp_path, target, name)
    expected = golden.arrays(f"infer_tree_{weights}_tli0.npz")
    prompt = expected["prompt"].long()
    mask = torch.ones_like(prompt)
    states = drafter.aggregate(target.capture(prompt, mask).kv_BTLK)
    key, value = drafter.project_kv(states, positions(mask))
    assert_close(states, expected["ekv2e_prompt"], **TOLERANCE)
    assert_close(key, expected["ca_key_prompt"], **TOLERANCE)
    assert_close(value, expected["ca_value_prompt"], **TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        "train_plain_tli0",
        "train_vfl_stair0_ep0_tli0",
        "train_vfl_stair1_ep0_tli0",
        "train_vfl_stair1_ep2_tli0",
    ],
)
def test_block_logits_under_each_mask(target: moaspec.Target, tmp_path: Path, name: str) -> None:
    drafter = golden.drafter(tmp_path, target, "drafter.safetensors")
    batch, expected = golden.arrays("train_batch.npz"), golden.arrays(f"{name}.npz")
    noisy = expected.get("response_mask_noisy", batch["response_mask"])
    index = torch.arange(noisy.shape[1]).expand_as(noisy)
    logits = block_logits(
        drafter,
        target,
        batch["input_ids"],
        batch["attention_mask"],
        last_known(index, noisy == 0),
        staircase_B=expected.get("staircase_applied", torch.zeros(2)).bool(),
    )
    real = batch["attention_mask"].bool()
    assert_close(logits[real], expected["logits"][real], **TOLERANCE)


@pytest.mark.parametrize("num_target_layers", [0, 1, 2])
def test_chain_logits(target: moaspec.Target, tmp_path: Path, num_target_layers: int) -> None:
    """Training pass and cached drafting both give the reference's chain."""
    drafter = golden.drafter(tmp_path, target, "drafter.safetensors")
    chain = golden.arrays("chain.npz")
    prompt, ids = chain["prompt"].long(), chain[f"tli{num_target_layers}.chain_ids"].long()
    expected = chain[f"tli{num_target_layers}.chain_logits"]
    tokens = torch.cat((prompt, ids[None, :-1]), dim=1)
    start = torch.full_like(tokens, prompt.shape[1] - 1)
    start[:, : prompt.shape[1]] = torch.arange(prompt.shape[1])
    logits = block_logits(
        drafter, target, tokens, torch.ones_like(tokens), start, num_target_layers=num_target_layers
    )
    assert_close(logits[0, prompt.shape[1] :], expected, **TOLERANCE)
    assert draft_chain(target, drafter, prompt[0].tolist(), num_target_layers) == ids.tolist()


def draft_chain(
    target: moaspec.Target, drafter: MoADrafter, prompt: list[int], num_target_layers: int
) -> list[int]:
    drafting = FastMoAProposer(drafter, target, num_target_layers=num_target_layers)
    verifier = LocalVerifier(target, drafting)
    drafting.share_target_cache(verifier.cache)
    (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, tuple(prompt))]))
    text = [*prompt, verdict.next_token]
    (tree,) = drafting.propose([RequestText(0, text)], moaspec.Chain(6))
    return [verdict.next_token, *tree.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "trained"])
def test_the_papers_tree_accepts_as_the_reference_does(
    target: moaspec.Target, tmp_path: Path, weights: str
) -> None:
    name = "drafter.safetensors" if weights == "random" else "drafter_trained.safetensors"
    drafter = golden.drafter(tmp_path, target, name)
    expected = golden.arrays(f"infer_tree_{weights}_tli0.npz")
    prompt = expected["prompt"][0].tolist()
    wanted = expected["greedy_ids"][0].tolist()[len(prompt) :]
    result = moaspec.generate(
        target,
        prompt,
        drafter=drafter,
        max_new_tokens=len(wanted),
        stop_token_ids=(),
        tree=PAPER_TREE,
    )
    stats = expected["padfix_accept_stats"].tolist()
    assert result.token_ids == wanted
    assert result.accept_lengths[:-1] == stats[:-1]
    assert result.accept_lengths[-1] <= stats[-1]


@pytest.mark.parametrize("weights", ["random", "trained"])
def test_stop_token(target: moaspec.Target, tmp_path: Path, weights: str) -> None:
    name = "drafter.safetensors" if weights == "random" else "drafter_trained.safetensors"
    drafter = golden.drafter(tmp_path, target, name)
    expected = golden.arrays(f"infer_eos_{weights}_tli0.npz")
    prompt = expected["prompt"][0].tolist()
    result = moaspec.generate(
        target,
        prompt,
        drafter=drafter,
        max_new_tokens=64,
        stop_token_ids=[int(expected["eos"])],
        tree=PAPER_TREE,
    )
    assert result.token_ids == expected["greedy_ids"][0].tolist()[len(prompt) :]
    assert result.stop_reason == "stop_token"
