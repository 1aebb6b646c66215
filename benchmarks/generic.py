"""Targets of any model type: plain decoding against transformers' `generate`, and passes of drafts.

Random models of realistic shapes are made in this process, so nothing is downloaded. Transformers
decodes with a model of its own that shares the weights. Both decode the same prompt greedily, in
turn. In float32 the texts must be equal. In bfloat16 a router that chooses another expert may move
logits by more than rounding explains; `text` in the JSON says how they part. Then rounds whose
drafts are all wrong show what a pass over a chain or a tree costs beside a pass over one token.

    python benchmarks/generic.py --dtype float32 --threads 1
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import setting, spread
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moaspec import OracleProposer, Target
from moaspec.evaluate.correctness.equality import judge
from moaspec.generation.local_engine import local_engine
from moaspec.target.generic.generic_target import target_of
from moaspec_core.drafting.tree_shapes import parse_shape

Clock = Callable[[], float]
SHAPES = ("chain:4", "tree:5x3x15")
"""Of drafts: passes of 5 and 16 tokens."""
_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
_LAYERS_OF_FIVE = ["sliding_attention"] * 4 + ["full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS | {"head_dim": 64},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 384},
    "gpt_oss": {
        "head_dim": 64,
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "gemma2": {"hidden_size": 640, "intermediate_size": 2560, "head_dim": 128},
    "gemma3n_text": {
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": 2 * _LAYERS_OF_FIVE,
        "num_kv_shared_layers": 5,
        "intermediate_size": [2048] * 10,
        "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 5,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 32000,
        "laurel_rank": 32,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "lfm2": {
        "hidden_size": 768,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"] * 2,
    },
    "falcon_h1": {
        "mamba_d_ssm": 768,
        "mamba_n_heads": 24,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 128,
    },
    "qwen3_5_text": {
        "head_dim": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2
        + ["linear_attention"] * 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
    },
}
"""Type and shape; each has 60 to 140 million parameters."""


def main() -> None:
    """Print two lines per model, then one line of JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--prompt-tokens", type=int, default=128)
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--cpu-time",
        action="store_true",
        help="Count this process's CPU seconds, where other processes use the cores.",
    )
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    figures = {}
    for name in args.models:
        print(f"{name}: {1 + args.rounds} turns ...", file=sys.stderr, flush=True)
        own, target = made(name, getattr(torch, args.dtype))
        data = figures[name] = measured(own, target, args)
        ratio, millions = data["speed_up"], data["parameters"] / 1e6
        print(
            f"{name:13} {millions:4.0f}M  {data['tokens_per_s']['median']:6.1f} tokens/s, "
            f"{ratio['median']:.2f}x transformers ({ratio['low']:.2f} to {ratio['high']:.2f})",
            flush=True,
        )
        passes = data["round_ms"]
        print("  ms a round:", ", ".join(f"{k} {v['median']:.1f}" for k, v in passes.items()))
    print(json.dumps({"benchmark": "generic", "setting": setting(target), "models": figures}))


def made(kind: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Target]:
    """A model for transformers and a target, which share their weights."""
    torch.manual_seed(0)
    settings = _COMMON | MODELS[kind]
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    ours = copy.deepcopy(own, {id(weight): weight for weight in own.parameters()})
    return own.eval(), target_of(ours, None, name=kind)


def measured(own: PreTrainedModel, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model.

    Raises:
        SystemExit: the texts differ by more than rounding, in float32.
    """
    torch.manual_seed(1)
    prompt = torch.randint(3, 32000, (args.prompt_tokens,)).tolist()
    limit, clock = args.max_new_tokens, _clock(args)
    ways: dict[str, Callable[[], list[int]]] = {
        "transformers": lambda: _own_text(own, prompt, limit),
        "moaspec": lambda: _decoded(target, prompt, limit, clock)[0],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[int]] = {}
    for turn in range(1 + args.rounds):
        for way, run in ways.items():
            started = clock()
            texts[way] = run()
            if turn:
                seconds[way].append(clock() - started)
    same = judge(
        target,
        prompt,
        texts["transformers"],
        texts["moaspec"],
        max_new_tokens=limit,
        stop_token_ids=(),
    )
    if not same.lossless and args.dtype == "float32":
        raise SystemExit(f"{target.name}: texts differ ({same}); no figures.")
    pairs = zip(*seconds.values(), strict=True)
    return {
        "parameters": sum(weight.numel() for weight in own.parameters()),
        "text": same.kind,
        "different_tokens": len(set(texts["moaspec"])),
        "tokens_per_s": spread([limit / s for s in seconds["moaspec"]]),
        "speed_up": spread([theirs / ours for theirs, ours in pairs]),
        "round_ms": _round_ms(target, prompt, texts["moaspec"], args),
    }


def _clock(args: argparse.Namespace) -> Clock:
    return time.process_time if args.cpu_time else time.perf_counter


def _own_text(model: PreTrainedModel, prompt: Sequence[int], limit: int) -> list[int]:
    ids_1T = torch.tensor([prompt])
    mask_1T = torch.ones_like(ids_1T)
    out = model.generate(ids_1T, attention_mask=mask_1T, max_new_tokens=limit, do_sample=False)
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def _decoded(
    target: Target,
    prompt: Sequence[int],
    limit: int,
    clock: Clock,
    drafting: tuple[OracleProposer, str] | None = None,
) -> tuple[list[int], list[float]]:
    """The text, and the milliseconds of each round."""
    drafts, shape = (drafting[0], parse_shape(drafting[1])) if drafting else (None, None)
    engine = local_engine(target, drafts)
    row = engine.add(prompt, max_new_tokens=limit, shape=shape)
    result, rounds_ms = engine.result(row), []
    while engine.num_active:
        started = clock()
        engine.step()
        rounds_ms.append(1000 * (clock() - started))
    return result.token_ids, rounds_ms[1:]


def _round_ms(
    target: Target, prompt: Sequence[int], text: Sequence[int], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Milliseconds of rounds without drafts, and with wrong ones."""
    wrong = OracleProposer([[*prompt, *text]], agreement=0.0)
    limit, clock = min(len(text), 16), _clock(args)
    found: dict[str, list[float]] = {"one token": [], **{shape: [] for shape in SHAPES}}
    for _ in range(args.rounds):
        found["one token"] += _decoded(target, prompt, limit, clock)[1]
        for shape in SHAPES:
            # The last rounds have fewer drafts, because fewer tokens are left.
            rounds_ms = _decoded(target, prompt, limit, clock, (wrong, shape))[1]
            found[shape] += rounds_ms[: limit - 8]
    return {name: spread(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
