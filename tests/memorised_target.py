"""A tiny target that has learned one answer by heart, and a drafter that half knows it.

Its text can be read, its tokens are words, and some drafts are accepted: what the page shows.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken

import serving
import tiny
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_train.dataset.examples import Example

QUESTION = "Why is the sky blue?"
ANSWER = (
    "The sky is blue because the air scatters the light of the sun. Light is a wave, and short "
    "waves meet the small parts of the air more often than long ones do. Blue light has short "
    "waves, so it comes to your eye from every side of the sky; red light has long waves, so most "
    "of it goes straight on.\n\nIn the evening the light of the sun takes a long way through the "
    "air. Most of the blue light is lost on that way, and what is left is red. That is why the "
    "evening sky is red, and why the sun is red too when it is low."
)
TARGET_STEPS = 90
DRAFTER_STEPS = 14
"""Few enough that many drafts are wrong."""


def tokenizer() -> Any:
    """Bytes, and the answer's words with the space before them."""
    made = serving.tokenizer()
    words = sorted(set(re.findall(r" \w+|\w{2,}", ANSWER)))
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def prompt_ids(of: Target, question: str = QUESTION) -> list[int]:
    """A question as the endpoint asks it."""
    tokens: Any = of.tokenizer
    asked = tokens.apply_chat_template(serving.say(question), add_generation_prompt=True)
    return list(asked["input_ids"])


def example(of: Target) -> Example:
    """The question, and the answer with its end."""
    tokens: Any = of.tokenizer
    ids = (*tokens(ANSWER, add_special_tokens=False)["input_ids"], serving.END)
    return Example(tuple(prompt_ids(of)), ids)


@functools.cache
def target() -> Target:
    """Writes ANSWER to QUESTION, and something like it to anything else."""
    words = tokenizer()
    of = tiny.fresh_target(
        tokenizer=words,
        vocab_size=len(words),
        max_position_embeddings=serving.CONTEXT,
        initializer_range=0.05,
        eos_token_id=serving.END,
    )
    learned = example(of)
    ids = torch.tensor([[*learned.prompt_ids, *learned.response_ids]])
    model, start = of.model.requires_grad_(requires_grad=True), len(learned.prompt_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(TARGET_STEPS):
        logits = model(input_ids=ids).logits[0, start - 1 : -1]
        optimizer.zero_grad()
        F.cross_entropy(logits, ids[0, start:]).backward()
        optimizer.step()
    model.requires_grad_(requires_grad=False)
    return of


@functools.cache
def drafter() -> MoADrafter:
    """Has read the answer, but not often enough."""
    of = target()
    return tiny.trained_drafter(of, [example(of)], steps=DRAFTER_STEPS)
