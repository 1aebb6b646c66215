"""The writer of training texts in `lab/`: its greedy texts are those of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from batch_writer import BatchWriter, Job

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
