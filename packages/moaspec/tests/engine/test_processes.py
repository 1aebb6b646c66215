"""The same seed gives the same text in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import moaspec
import tiny

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

NEW_TOKENS = 20

PROGRAM = f"""
import json, torch, tiny, moaspec
torch.set_num_threads(2)
target = tiny.target()
results = moaspec.generate(
    target, tiny.PROMPTS, drafter=tiny.random_drafter(target), tree="tree:3x3x8",
    max_new_tokens={NEW_TOKENS}, temperature=1.0, top_p=0.95, seed=12,
)
print(json.dumps([result.token_ids for result in results]))
"""


def test_another_process_thread_count_and_batch() -> None:
    """There: two threads, one batch, drafts. Here: one thread, one prompt at a time, no drafts.

    Hashes of strings are seeded otherwise, so that nothing may hang on their order.
    """
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    here = [
        moaspec.generate(
            tiny.target(), prompt, max_new_tokens=NEW_TOKENS, temperature=1.0, top_p=0.95, seed=12
        ).token_ids
        for prompt in tiny.PROMPTS
    ]
    assert json.loads(found.stdout) == here
    greedy = moaspec.generate(tiny.target(), tiny.PROMPTS, max_new_tokens=NEW_TOKENS)
    assert all(one.token_ids != text for one, text in zip(greedy, here, strict=True))
