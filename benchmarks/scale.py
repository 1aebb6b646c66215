"""Speed-up of drafts on targets of 135M to 8B, by the costs of random models and an assumed tau.

Costs do not depend on the numbers in the weights. So targets of the shapes of SmolLM2 and Llama 3,
and their drafters, are made of random numbers on the device, layer by layer. Layers beyond
`--layers-gb` share the weights of earlier ones: no cache holds as much, so they are read as slowly.
`--quantize int4` rounds the layers' weights as `load_target` does.

After 512 tokens of context all parts are timed in turns: passes over 1 to 64 tokens (head and
choice included), encodings, plain rounds, and rounds with drafts. Figures are medians; a row whose
quartiles are over 10% of the median apart has a star. For an assumed tau the speed-up is the median
over turns of

    tau * plain round / (round with drafts + encoding of tau tokens - encoding of those it accepted)

On a GPU all is measured with and without CUDA graphs. Targets that `--json` has are not measured
again.

    python benchmarks/scale.py --device cuda --quantize none int4 --json scale.json --plot scale.svg
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import setting, spread
from torch import nn
from transformers import LlamaConfig

from moaspec import Target, Tree
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.backends.fast_target import FastDecoderLayers, accelerate
from moaspec.backends.linear_backends import can_pack
from moaspec.backends.pack import pack_linears
from moaspec.backends.weight_only import BITS, quantise
from moaspec.calibration.round_parts import RoundParts, pass_over, timed
from moaspec.drafting.kv_cache import KVCache
from moaspec.generation.local_engine import local_parts
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import DTYPES, skeleton_of
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.tree_shapes import Chain, parse_shape
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Timing
from moaspec_core.policy.policies import DraftPolicy
from moaspec_core.support.extras import require
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from eval_report.plots import NO_METADATA, TEXT, scalable
from eval_studies.pass_costs import linear_layers, weight_bytes

CONTEXT = 512
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TAUS = (2.0, 3.0, 4.2, 4.8)
ENCODED = (1, 2, 4, 8)
ONE, LONG = Chain(1), Chain(7)
TURNS = (5, 25)  # at least and at most; between them `--seconds` decides
RECORDED_AFTER = 3  # turns of a GPU before its passes are replayed
NOISY = 0.1  # of the median between the quartiles
NONE = "none"  # of `--quantize`
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
    args = options().parse_args()
    torch.set_num_threads(args.threads)
    found = known(args)
    done = {(data["target"], data["quantize"]) for data in found}
    asked = [(name, quantize) for name in args.shapes for quantize in args.quantize]
    left = [one for one in asked if one not in done]
    sizes = [layer_size(SHAPES[name]) * SHAPES[name].num_hidden_layers for name, _ in left]
    started = time.perf_counter()
    for i, (name, quantize) in enumerate(left):
        found += scaled(name, quantize, args)
        if args.json is not None:  # after each target: an interrupted run goes on behind it
            args.json.write_text(as_json(found, args) + "\n", encoding="utf-8")
        gc.collect()  # modules refer to one another, and the next target needs the room
        spent_s = time.perf_counter() - started
        rest_s = spent_s * sum(sizes[i + 1 :]) / sum(sizes[: i + 1])
        print(f"{name}, {quantize}: {spent_s:.0f} s so far, at most {rest_s:.0f} left", flush=True)
    found.sort(key=lambda data: asked.index((data["target"], data["quantize"])))
    print(tables(found))
    if args.plot is not None:
        draw(found, args.plot)
    print(as_json(found, args))


def options() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description="Speed-up of drafts by the target's size.")
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    add("--device", default="cpu")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--threads", type=int, default=2)
    add("--quantize", nargs="+", choices=[NONE, *BITS], default=[NONE], help="By torchao.")
    add("--layers-gb", type=float, default=0, help="Of layers that are made; 0 makes all.")
    add("--draft-vocab", type=int, default=0, help="16384, say; 0 drafts any id.")
    add("--drafts", nargs="+", default=[str(LONG), "tree:6x8x62"])
    add("--seconds", type=float, default=60, help="Of the turns of a target.")
    add("--json", type=Path, help="A file of figures, which is continued.")
    add("--plot", type=Path, help="An SVG file.")
    return parser


def known(args: argparse.Namespace) -> list[Figures]:
    """Figures of the file that the run continues."""
    if args.json is None or not args.json.exists():
        return []
    data = json.loads(args.json.read_text(encoding="utf-8"))
    if data["settings"] != settings(args):
        sys.exit(f"{args.json} has figures of other settings: {data['settings']}. Name another.")
    return list(data["targets"])


def settings(args: argparse.Namespace) -> Figures:
    """What is the same for all figures of a file."""
    names = ("device", "dtype", "threads", "layers_gb", "draft_vocab", "drafts")
    return {name: getattr(args, name) for name in names} | {"context": CONTEXT}


def as_json(found: Sequence[Figures], args: argparse.Namespace) -> str:
    """All figures in one line."""
    return json.dumps({"benchmark": "scale", "settings": settings(args), "targets": found})


def layer_size(config: LlamaConfig) -> int:
    """Weights of a layer."""
    wide, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    return int(wide * (2 * heads * config.head_dim + 3 * config.intermediate_size))


def scaled(name: str, quantize: str, args: argparse.Namespace) -> list[Figures]:
    """Figures of one target: with and without CUDA graphs on a GPU."""
    target = random_target(name, quantize, args)
    drafter = random_drafter(target, SIZES.get(name, {}), args.draft_vocab)
    shapes = {text: parse_shape(text) for text in args.drafts}
    found: list[Figures] = []
    for graphs in (True, False) if target.layers.records else (False,):
        if not graphs and isinstance(target.layers, FastDecoderLayers):
            target.layers.graphs = None
        data = setting(target) | {"graphs": graphs, "drafter": drafter.num_parameters}
        data |= {"quantize": quantize, "weight_bytes": pass_bytes(target)}
        turns = Turns(target, drafter, shapes)
        found.append(data | figures_of(turns, args.drafts, args.seconds, graphs=graphs))
    return found


def random_target(name: str, quantize: str, args: argparse.Namespace) -> Target:
    """A Llama made on the device and accelerated."""
    config = copy.deepcopy(SHAPES[name])
    layers, most = config.num_hidden_layers, args.layers_gb * 1e9 / 2 / layer_size(config)
    config.num_hidden_layers = min(layers, math.ceil(most)) if most else layers
    model = skeleton_of(config, args.dtype).to_empty(device=args.device)
    model.tie_weights()
    with torch.no_grad(), torch.device(args.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no weights
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    if quantize != NONE:
        quantise(model, quantize, name=name, packed=True)
    if can_pack(model.dtype, model.device):
        pack_linears(model.model.layers)  # once what several layers are to share
    lengthen(model, layers)
    target = Target(model, None, name=name, quantize=None if quantize == NONE else quantize)
    accelerate(target)
    return target


def lengthen(model: Any, layers: int) -> None:
    """Add layers that share all modules with those which are there, in turns."""
    made, config = [*model.model.layers], model.config
    config.num_hidden_layers = layers
    for index in range(len(made), layers):
        source = made[index % len(made)]
        with torch.device("meta"):
            layer = type(source)(config, index)
        for name, module in source.named_modules():
            if not [*module.children()]:
                layer.set_submodule(name, module)
        model.model.layers.append(layer.eval())


def pass_bytes(target: Target) -> int:
    """Bytes of weights that a pass reads; those that layers share count for each."""
    parts: list[nn.Module] = [*target.model.base_model.layers, target.draft_head(None)]
    linears = [linear for part in parts for linear in linear_layers(part.modules())]
    return sum(weight_bytes(linear, target.dtype) for linear in linears)


def random_drafter(target: Target, sizes: Mapping[str, Any], draft_vocab: int) -> MoADrafter:
    """A drafter made on the target's device; `draft_vocab` 0 drafts all ids."""
    with torch.device(target.device):
        ids = torch.arange(draft_vocab) if draft_vocab else None
        drafter = MoADrafter(drafter_config(target, DrafterSizes(**sizes)), ids)
    return drafter.to(target.dtype).eval().requires_grad_(requires_grad=False)


class Chosen(DraftPolicy):
    """Drafts what the benchmark chose for the round."""

    tree: Tree | None = None
    wants_features = True

    def shape(self, length: int, num_requests: int, copied: float) -> Tree | None:
        del length, num_requests, copied
        return self.tree

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        del tree, accepted


class Turns:
    """All parts of one target, which each turn times once: milliseconds by part.

    Args:
        shapes: of drafts, by name.
    """

    def __init__(self, target: Target, drafter: MoADrafter, shapes: Mapping[str, Tree]) -> None:
        self._device, self._chosen = target.device, Chosen()
        self._shapes = {str(ONE): ONE, str(LONG): LONG, **shapes}
        verifier, proposer = local_parts(target, drafter)
        assert isinstance(proposer, FastMoAProposer)
        parts, cache = RoundParts(target, proposer), KVCache(target)
        self._passes = {n: whole_pass(target, cache, n) for n in WIDTHS}
        self._encodings = {n: parts.encode(n).run for n in ENCODED}
        self._drafting = Engine(verifier, proposer, target=target)
        self._plain = Engine(local_parts(target)[0], target=target)
        prompt = [(7 * i) % min(target.vocab_size, 499) for i in range(CONTEXT)]
        self._timing = self._begun(self._drafting, prompt, self._chosen)
        self._begun(self._plain, prompt, None)

    def _begun(self, engine: Engine, prompt: Sequence[int], shape: DraftPolicy | None) -> Timing:
        handle = engine.add(prompt, max_new_tokens=4 * CONTEXT, shape=shape)
        engine.step()
        return engine.result(handle).timing

    def turn(self) -> dict[str, float]:
        found = {}
        for n, run in self._passes.items():
            found[f"pass {n}"], _ = self._ms(run)
            if n in self._encodings:  # behind a pass, as in a round
                found[f"encode {n}"], _ = self._ms(self._encodings[n])
        found["plain"], _ = self._ms(self._plain.step)
        for name, tree in self._shapes.items():
            self._chosen.tree = tree
            before_s = self._timing.draft_s
            found[f"round {name}"], (event,) = self._ms(self._drafting.step)
            found[f"draft {name}"] = 1000 * (self._timing.draft_s - before_s)
            found[f"emitted {name}"] = 1 + len(event.accepted)
        longer = found[f"draft {LONG}"] - found[f"draft {ONE}"]
        return found | {"step": longer / (LONG.depth - ONE.depth)}

    def _ms(self, run: Callable[[], Any]) -> tuple[float, Any]:
        with torch.inference_mode():
            seconds, result = timed(run, self._device)
        return 1000 * seconds, result


def whole_pass(target: Target, cache: KVCache, tokens: int) -> Callable[[], object]:
    """A pass with the head and the choice of each next token."""
    run = pass_over(target, cache, tokens, CONTEXT)
    return lambda: target.best(run().flatten(0, 1)).tolist()


def figures_of(turns: Turns, names: Sequence[str], seconds: float, *, graphs: bool) -> Figures:
    """Medians and quartiles of all parts, and of speed-ups by tau for each shape of drafts."""
    for _ in range(RECORDED_AFTER if graphs else 1):
        turns.turn()
    (least, most), end = TURNS, time.perf_counter() + seconds
    found: list[dict[str, float]] = []
    while len(found) < least or (len(found) < most and time.perf_counter() < end):
        found.append(turns.turn())

    def of(part: str) -> Figures:
        return spread([one[part] for one in found])

    encode = [of(f"encode {n}")["median"] for n in ENCODED]

    def speedups(name: str, tau: float) -> list[float]:
        ratios = []
        for one in found:
            more, less = np.interp([tau, one[f"emitted {name}"]], ENCODED, encode)
            ratios.append(float(tau * one["plain"] / (one[f"round {name}"] + more - less)))
        return ratios

    def drafted(name: str) -> Figures:
        parts = {part: of(f"{part} {name}") for part in ("draft", "round")}
        return parts | {"speedup": {str(tau): spread(speedups(name, tau)) for tau in TAUS}}

    return {
        "turns": len(found),
        "pass": {str(n): of(f"pass {n}") for n in WIDTHS},
        "encode": {str(n): of(f"encode {n}") for n in ENCODED},
        "step": of("step"),
        "plain": of("plain"),
        "drafts": {name: drafted(name) for name in names},
    }


def tables(found: Sequence[Figures]) -> str:
    """Costs, then speed-ups, in Markdown."""
    names = list(found[0]["drafts"])
    rounds = [f"{part}, {name}" for name in names for part in ("draft", "round")]
    head = [
        "ms",
        "GB",
        *(f"pass {n}" for n in WIDTHS),
        "encode 4",
        "step",
        "plain",
        *rounds,
        "apart",
    ]
    heads = ["target", "drafts", *(f"tau {tau:g}" for tau in TAUS), "apart"]
    costs, speeds = [head, ["---"] * len(head)], [[], heads, ["---"] * len(heads)]
    for data in found:
        shown = [*data["pass"].values(), data["encode"]["4"], data["step"], data["plain"]]
        shown += [data["drafts"][name][part] for name in names for part in ("draft", "round")]
        large = [*data["pass"].values(), data["plain"]]
        large += [data["drafts"][name]["round"] for name in names]
        cells = [f"{data['weight_bytes'] / 1e9:.2f}", *(f"{one['median']:.1f}" for one in shown)]
        costs.append([label(data), *cells, apart(large)])
        for name in names:
            ratios = [*data["drafts"][name]["speedup"].values()]
            cells = [f"{ratio['median']:.2f}x" for ratio in ratios]
            speeds.append([label(data), name, *cells, apart(ratios)])
    return "\n".join(f"| {' | '.join(row)} |" if row else "" for row in costs + speeds)


def label(data: Figures) -> str:
    """The target and its precision."""
    parts = [data["target"], data["dtype"] if data["quantize"] == NONE else data["quantize"]]
    return ", ".join(parts + ["graphs"] * data["graphs"])


def apart(figures: Sequence[Figures]) -> str:
    """The most that quartiles are apart, of their median."""
    most = max((figure["high"] - figure["low"]) / figure["median"] for figure in figures)
    return f"{100 * most:.0f}%" + "*" * (most > NOISY)


def draw(found: Sequence[Figures], path: Path) -> None:
    """Draw, for each precision, passes by tokens and speed-ups by target."""
    require("--plot", "matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    shown = [one for one in found if one["graphs"]] or found
    kinds = list(dict.fromkeys(one["quantize"] for one in shown))
    with matplotlib.rc_context({**TEXT, "svg.hashsalt": "scale"}):
        figure = Figure(figsize=(3.6 * len(kinds) + 1.2, 6.0), layout="constrained")
        grid = figure.subplots(2, len(kinds), sharey="row", squeeze=False)
        for (upper, lower), kind in zip(grid.T, kinds, strict=True):
            data = [one for one in shown if one["quantize"] == kind]
            upper.set_title(data[0]["dtype"] if kind == NONE else kind)
            draw_passes(upper, data)
            draw_speedups(lower, data)
        grid[0, 0].set_ylabel("time over that of one token")
        grid[1, 0].set_ylabel("speed-up")
        for axes in grid[:, 0]:  # which share it with the others of their row
            axes.set_ylim(bottom=0)
        for axes in grid[:, -1]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    path.write_text(scalable(buffer.getvalue(), "Drafts by the target's size"), encoding="utf-8")


def draw_passes(axes: Any, found: Sequence[Figures]) -> None:
    """A line for each target."""
    for data in found:
        passes = [one["median"] for one in data["pass"].values()]
        axes.plot(WIDTHS, np.array(passes) / passes[0], "o-", label=data["target"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(WIDTHS, [str(n) for n in WIDTHS])
    axes.set_xlabel("tokens in a pass")


def draw_speedups(axes: Any, found: Sequence[Figures]) -> None:
    """A line for each tau and shape of drafts."""
    for name, style in zip(found[0]["drafts"], ("o-", "s--", "^:", "v-."), strict=False):
        for i, tau in enumerate(TAUS):
            medians = [one["drafts"][name]["speedup"][str(tau)]["median"] for one in found]
            names = [one["target"] for one in found]
            axes.plot(names, medians, style, color=f"C{i}", label=f"{name}, tau {tau:g}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("target")


if __name__ == "__main__":
    main()
