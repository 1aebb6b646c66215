"""Writes a suite of prompts of set lengths, to see what drafts are worth far into a text.

Each prompt is as many of a suite's own first turns as fit into so many tokens, one below another,
and a request at their end. Its category is its length.

    python lab/long_prompts.py --suite paper_eval/sum.jsonl --out long.jsonl
    moaspec eval --suite long.jsonl --methods plain --tau-only moa@tree:6x8x62+nocopy
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from moaspec import load_target
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.target.target import Target
from moaspec_core.cli.prompts import chat_ids

LENGTHS = (512, 1024, 2048, 4096, 7680)
REQUEST = "Say in a few sentences what the last of these texts is about."


def main() -> None:
    """Write one line per prompt."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--suite", required=True, help="Where the texts are from.")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS], help="In tokens.")
    options.add_argument("--prompts", type=int, default=3, help="Of each length.")
    options.add_argument("--out", type=Path, required=True)
    args = options.parse_args()
    target = load_target(args.model)
    texts = cycle([prompt.turns[0] for prompt in read_prompts(args.suite)])
    with args.out.open("w", encoding="utf-8") as file:
        for length in args.lengths:
            for number in range(args.prompts):
                turn = longest(target, texts, length)
                row = {
                    "question_id": f"{length}-{number}",
                    "category": f"{length}",
                    "turns": [turn],
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def longest(target: Target, texts: Iterator[str], length: int) -> str:
    """As many texts as fit, the last one cut, and the request: at most `length` tokens."""
    joined = ""
    while len(chat_ids(target, f"{joined}{REQUEST}")) < length:
        joined += f"{next(texts)}\n\n"
    low, high = 0, len(joined)
    while high - low > 1:
        middle = (low + high) // 2
        fits = len(chat_ids(target, f"{joined[:middle]}\n\n{REQUEST}")) <= length
        low, high = (middle, high) if fits else (low, middle)
    return f"{joined[:low]}\n\n{REQUEST}"


if __name__ == "__main__":
    main()
