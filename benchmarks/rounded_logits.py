"""How far logits of a GGUF target are from float32's, with exact products and inputs in 8 bits.

Texts are this repository's pages and code, 512 tokens at a time. A line for each text has the means
so far: KL divergence in nats, and the share of tokens whose most likely next token is another one.

    python benchmarks/rounded_logits.py --model qwen2.5-coder-0.5b --tokens 20000 --threads 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import distances, log_probabilities
from torch import Tensor

from moaspec import Target, load_target

LENGTH = 512
PLACES = ("docs/*.md", "packages/moaspec/src/moaspec/*/*.py")


def main() -> None:
    """Print a line for each text."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="qwen2.5-coder-0.5b")
    options.add_argument("--tokens", type=int, default=20000)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    reference = load_target(args.model, dtype="float32")
    others = {
        "bfloat16": load_target(args.model, dtype="bfloat16"),
        "inputs in 8 bits": load_target(args.model, dtype="bfloat16", quantize="inputs"),
    }
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in others}
    texts = _texts(reference, args.tokens // LENGTH)
    for number, ids in enumerate(texts, 1):
        right_TV = log_probabilities(reference, ids)
        for name, target in others.items():
            found_TV = log_probabilities(target, ids)
            sums[name] += torch.stack([each_T.sum() for each_T in distances(right_TV, found_TV)])
        counted = number * LENGTH
        told = [
            f"{name}: KL {float(kl) / counted:.2e}, changed {float(changed) / counted:.2%}"
            for name, (kl, changed) in sums.items()
        ]
        print(f"{counted} tokens; " + "; ".join(told), flush=True)


def _texts(target: Target, count: int) -> list[Tensor]:
    """Token ids, from places in turns, so that pages and code are mixed."""
    tokenizer: Any = target.tokenizer
    root = Path(__file__).parents[1]
    pieces = [
        torch.tensor(
            tokenizer.encode("\n".join(path.read_text() for path in sorted(root.glob(place))))
        ).split(LENGTH)[:-1]
        for place in PLACES
    ]
    return [piece for both in zip(*pieces, strict=False) for piece in both][:count]


if __name__ == "__main__":
    main()
