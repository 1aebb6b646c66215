"""Scripts of `lab/`: the writer of training texts, sums of weights, and other drafters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_train.data_order import blocks_at
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.run_config import TrainConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from add_change import add_change
from batch_writer import BatchWriter, Job
from eagle3 import Eagle3Proposer, captured, new_head

STOPS = {5, 11}


def test_greedy_texts_are_those_of_generate() -> None:
    """More texts than rows, of different lengths, some sampled between them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    jobs = [
        Job(list(range(20, 24 + 5 * i)), 0.8 if i % 4 == 0 else 0.0, 3 + 4 * i) for i in range(9)
    ]
    waiting = iter(jobs)
    writer = BatchWriter(model, rows=4, length=128, stops=STOPS, seed=1)
    assert len(list(writer.write(lambda: next(waiting, None)))) == len(jobs)
    for job in jobs:
        assert 1 <= len(job.response) <= job.max_new_tokens
        if job.temperature == 0:
            ids = torch.tensor([job.prompt])
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=job.max_new_tokens,
                eos_token_id=sorted(STOPS),
                pad_token_id=0,
            )
            assert job.response == expected[0, len(job.prompt) :].tolist()


def test_a_share_of_a_change_is_added_where_weights_are_common(tmp_path: Path) -> None:
    """Weights of the base alone, token ids and the head's moment stay."""
    ids, one = torch.tensor([3, 5]), torch.ones(2, dtype=torch.bfloat16)
    weights = {
        "base": {"w": 2 * one, "exit": one, "head_moment": 3 * one, "draft_token_ids": ids},
        "before": {"w": 4 * one, "head_moment": 0 * one, "draft_token_ids": ids},
        "after": {"w": 8 * one, "head_moment": 9 * one, "draft_token_ids": ids},
    }
    for name, tensors in weights.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}", encoding="utf-8")
    base, before, after, output = (tmp_path / one for one in (*weights, "sum"))
    add_change(base, before, after, 0.5, output)
    found, kept = load_file(output / "model.safetensors"), weights["base"]
    assert torch.equal(found.pop("w"), 4 * one)
    assert found.keys() == kept.keys() - {"w"}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in found.items())
    assert (output / "config.json").read_text(encoding="utf-8") == "{}"


@torch.no_grad()
def test_eagle_3_drafts_what_it_is_trained_on() -> None:
    """A chain's drafts are the training pass's choices along the text that they continue."""
    target = tiny.target()
    config = TrainConfig(target="tiny", data=("unused",), output="unused", drafter="eagle")
    head = new_head(target, config, None)
    for weight in head.parameters():
        weight.mul_(4)  # or drafts would hardly depend on states
    texts = [([*prompt, *own], begin) for prompt, own in _texts() for begin in (5, 9)]
    for text, begin in texts:
        proposer = Eagle3Proposer(head, target)
        proposer.append_features(0, captured(target, text[:begin]))
        (tree,) = proposer.propose([RequestText(0, text[: begin + 1])], Chain(4))
        drafted = [*text[: begin + 1], *tree.tokens]
        batch = collate([Example(tuple(drafted[:2]), tuple(drafted[2:]))], [0])
        begins_BT = torch.zeros_like(batch.input_ids_BT, dtype=torch.bool)
        begins_BT[0, [4, begin]] = True
        states_TG = captured(target, drafted)
        states_TG[begin:].normal_()  # what a round does not know yet
        embeddings_BTE = target.embed(batch.input_ids_BT)
        states_BTE = head(embeddings_BTE, states_TG[None], batch, blocks_at(batch, begins_BT))
        chosen = target.head(states_BTE[0, begin:-1]).argmax(-1).tolist()
        assert chosen == list(tree.tokens)
        assert len(set(chosen)) > 1


def _texts() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return list(zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True))
