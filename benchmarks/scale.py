"""Speed-up of drafts on targets of 135M to 8B, by the costs of random models and an assumed tau.

Costs do not depend on the numbers in the weights. So targets of the shapes of SmolLM2 and Llama 3,
and their drafters, are made of random numbers on the device. After 512 tokens of context the script
times passes over 1 to 64 tokens (head and choice included), drafts, encodings and whole rounds. The
overhead is a round's time less that of its parts. For an assumed tau the speed-up is

    tau * (pass over one token + overhead) / (draft + pass over all drafts + encoding + overhead)

On a GPU all is measured with and without CUDA graphs. An overhead below zero tells of parts that
overlap, or of a busy machine.

    python benchmarks/scale.py --device cuda --json scale.json --plot scale.svg
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import setting
from transformers import LlamaConfig

from moaspec import Target, Tree
from moaspec.backends.fast_target import FastDecoderLayers, accelerate
from moaspec.backends.weight_only import quantise
from moaspec.calibration.round_parts import RoundParts, timed
from moaspec.drafting.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.tree_shapes import Chain, parse_shape
from moaspec.evaluate.methods import Method
from moaspec.generation.local_engine import local_engine
from moaspec.model.moa import MoADrafter
from moaspec.support.extras import require
from moaspec.target.registry import DTYPES, skeleton_of
from moaspec.train.students.drafter_sizes import DrafterSizes, drafter_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from eval_studies.pass_costs import RoundCost, measure_costs

CONTEXT = 512
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TAUS = (2.0, 3.0, 4.2, 4.8)
ENCODED = (1, 2, 4, 8)
ONE, LONG = Chain(1), Chain(7)
REPEATS, WARM_UPS = 5, 3
Figures = dict[str, Any]


def llama(
    hidden: int, inner: int, layers: int, *, heads: int, kv_heads: int, vocab: int = 128_256
) -> LlamaConfig:
    """A Llama's config; below a width of 4096 the embedding is the head."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=hidden < 4096,
    )


SHAPES = {
    "135M": llama(576, 1536, 30, heads=9, kv_heads=3, vocab=49_152),
    "360M": llama(960, 2560, 32, heads=15, kv_heads=5, vocab=49_152),
    "1B": llama(2048, 8192, 16, heads=32, kv_heads=8),
    "3B": llama(3072, 8192, 28, heads=24, kv_heads=8),
    "8B": llama(4096, 14_336, 32, heads=32, kv_heads=8),
}
"""SmolLM2 135M and 360M, Llama 3.2 1B and 3B, Llama 3 8B."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "135M": {"lsa_intermediate": 192},
    "8B": {"parameters": 250_000_000, "lsa_heads": 32},
}
"""Of the bundled drafter and the paper's; others have the widths of their targets' layers."""


def main() -> None:
    """Measure one target after another, then print tables and JSON."""
    options = argparse.ArgumentParser(description="Speed-up of drafts by the target's size.")
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--quantize", help="int8 or int4 rounds the target's weights by torchao.")
    options.add_argument("--draft-vocab", type=int, default=0, help="16384, say; 0 drafts any id.")
    options.add_argument("--drafts", nargs="+", default=[str(LONG), "tree:6x8x62"])
    options.add_argument("--json", type=Path, help="A file for the last line, figures in JSON.")
    options.add_argument("--plot", type=Path, help="A file for a plot: .svg, .png or .pdf.")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    found: list[Figures] = []
    for name in args.shapes:
        started = time.perf_counter()
        found += scaled(name, args)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        figures = json.dumps({"benchmark": "scale", "context": CONTEXT, "targets": found})
        if args.json is not None:  # after each target, so that a time limit leaves some
            args.json.write_text(figures + "\n", encoding="utf-8")
        gc.collect()  # modules refer to one another, and the next target needs the room
    print(tables(found))
    if args.plot is not None:
        draw(found, args.plot)
    print(figures)


def scaled(name: str, args: argparse.Namespace) -> list[Figures]:
    """Figures of one target: with and without CUDA graphs on a GPU."""
    target = random_target(SHAPES[name], name, args)
    drafter = random_drafter(target, SIZES.get(name, {}), args.draft_vocab)
    drafts = {text: parse_shape(text) for text in args.drafts}
    found: list[Figures] = []
    for graphs in (True, False) if target.layers.records else (False,):
        if not graphs and isinstance(target.layers, FastDecoderLayers):
            target.layers.graphs = None
        facts = setting(target) | {"graphs": graphs, "drafter": drafter.num_parameters}
        facts |= {"quantize": args.quantize, "draft_vocabulary": args.draft_vocab}
        found.append(facts | measured(target, drafter, drafts))
    return found


def random_target(config: LlamaConfig, name: str, args: argparse.Namespace) -> Target:
    """A Llama made on the device and accelerated."""
    model = skeleton_of(config, args.dtype).to_empty(device=args.device)
    model.tie_weights()
    with torch.no_grad(), torch.device(args.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no weights
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    if args.quantize is not None:
        quantise(model, args.quantize, name=name, packed=True)
    target = Target(model, None, name=name, quantize=args.quantize)
    accelerate(target)
    return target


def random_drafter(target: Target, sizes: Mapping[str, Any], draft_vocab: int) -> MoADrafter:
    """A drafter made on the target's device; `draft_vocab` 0 drafts all ids."""
    with torch.device(target.device):
        ids = torch.arange(draft_vocab) if draft_vocab else None
        drafter = MoADrafter(drafter_config(target, DrafterSizes(**sizes)), ids)
    return drafter.to(target.dtype).eval().requires_grad_(requires_grad=False)


def measured(target: Target, drafter: MoADrafter, drafts: Mapping[str, Tree]) -> Figures:
    """Milliseconds of all parts, and speed-ups by tau for each shape of the drafts."""
    shapes = {str(ONE): ONE, str(LONG): LONG, **drafts}
    methods = {name: Method(name, target, drafter, shape) for name, shape in shapes.items()}
    costs = measure_costs([*methods.values()], contexts=[CONTEXT], batches=[1], widths=WIDTHS)
    rounds = {cost.method: cost for cost in costs.rounds}
    one_s, encode_s = costs.widths[0].seconds, encoding(target, drafter)
    plain_s = one_s + rest_s(Method("plain", target), lambda _: one_s)
    steps_s = rounds[str(LONG)].draft_s - rounds[str(ONE)].draft_s

    def drafted(cost: RoundCost) -> Figures:
        def parts_s(emitted: float) -> float:
            return cost.draft_s + cost.verify_s + encode_s(emitted)

        more_s = rest_s(methods[cost.method], parts_s)
        parts = {"draft": cost.draft_s, "verify": cost.verify_s, "overhead": more_s}
        speedup = {tau: tau * plain_s / (parts_s(tau) + more_s) for tau in TAUS}
        return {part: 1000 * seconds for part, seconds in parts.items()} | {"speedup": speedup}

    return {
        "weight_bytes": costs.bound.weight_bytes,
        "pass": {cost.tokens: 1000 * cost.seconds for cost in costs.widths},
        "plain_overhead": 1000 * (plain_s - one_s),
        "chain_step": 1000 * steps_s / (LONG.depth - ONE.depth),
        "encode": {n: 1000 * encode_s(n) for n in ENCODED},
        "drafts": {name: drafted(rounds[name]) for name in drafts},
    }


def encoding(target: Target, drafter: MoADrafter) -> Callable[[float], float]:
    """Seconds of encoding by number of tokens, interpolated."""
    bench = RoundParts(target, FastMoAProposer(drafter, target))
    timings = [bench.encode(n) for n in ENCODED]
    with torch.inference_mode():
        for turn in range(1 + REPEATS):
            for part in timings:
                part.time(counts=turn > 0)
    return lambda tokens: float(np.interp(tokens, ENCODED, [part.median_s for part in timings]))


def rest_s(method: Method, parts_s: Callable[[float], float]) -> float:
    """Seconds of a round beyond its parts, which take `parts_s` of the tokens that it emits."""
    engine = local_engine(method.target, method.drafter)
    shape = None if method.drafter is None else method.fixed_shape
    prompt = [(7 * i) % min(method.target.vocab_size, 499) for i in range(CONTEXT)]
    engine.add(prompt, max_new_tokens=CONTEXT, shape=shape)
    for _ in range(1 + WARM_UPS):
        engine.step()
    rests = []
    for _ in range(REPEATS):
        elapsed, (event,) = timed(engine.step, method.target.device)
        rests.append(elapsed - parts_s(1 + len(event.accepted)))
    engine.abort_all()
    return statistics.median(rests)


def tables(found: Sequence[Figures]) -> str:
    """Costs, then speed-ups, in Markdown."""
    names = list(found[0]["drafts"])
    kinds = [(name, part) for name in names for part in ("draft", "overhead")]
    head = ["ms", "GB", *(f"pass {n}" for n in WIDTHS), "encode 4", "step", *map(" ".join, kinds)]
    heads = ["target", "drafts", *(f"tau {tau:g}" for tau in TAUS)]
    costs, speeds = [head, ["---"] * len(head)], [[], heads, ["---"] * len(heads)]
    for facts in found:
        target = facts["target"] + (", graphs" if facts["graphs"] else "")
        numbers = [facts["weight_bytes"] / 1e9, *facts["pass"].values(), facts["encode"][4]]
        numbers += [facts["chain_step"], *(facts["drafts"][name][part] for name, part in kinds)]
        costs.append([target, *(f"{number:.2f}" for number in numbers)])
        for name in names:
            ratios = facts["drafts"][name]["speedup"].values()
            speeds.append([target, name, *(f"{ratio:.2f}x" for ratio in ratios)])
    return "\n".join(f"| {' | '.join(row)} |" if row else "" for row in costs + speeds)


def draw(found: Sequence[Figures], path: Path) -> None:
    """Draw passes by tokens, and speed-ups by target for the last shape of drafts."""
    require("--plot", "report")
    from matplotlib.figure import Figure

    shown, drafts = [one for one in found if one["graphs"]] or found, list(found[0]["drafts"])[-1]
    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for facts in shown:
        passes = [*facts["pass"].values()]
        left.plot(WIDTHS, np.array(passes) / passes[0], "o-", label=facts["target"])
    left.set_xscale("log", base=2)
    left.set(xlabel="tokens in a pass", ylabel="time over that of one token")
    for tau in TAUS:
        values = [facts["drafts"][drafts]["speedup"][tau] for facts in shown]
        right.plot([facts["target"] for facts in shown], values, "o-", label=f"tau {tau:g}")
    right.set(xlabel="target", ylabel=f"speed-up by {drafts}")
    figure.legend(loc="outside right", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
