"""Is the text over a bad link the local text? Real prompts, a real model, everything at once.

Each text crosses a link that loses, doubles, delays and reorders messages, is cut three times, and
leads to a server that is killed and started anew in the middle of the text. Codec and N change from
prompt to prompt, and every prompt is decoded greedily and sampled. A text that is not the local
plain one, token for token, must differ at a near-tie first
(`moaspec.evaluate.correctness.equality`), or the run fails. The last line is JSON.

    python tests/soak/remote_equality.py --suite mt_bench.jsonl --prompts 20
    python tests/soak/remote_equality.py --prompts 5 --tiny      # random weights
    scripts/with_vllm.sh python tests/soak/remote_equality.py --engine vllm --prompts 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch

import moaspec
from moaspec.evaluate.correctness.equality import judge
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import find_weights, read_target_spec
from moaspec_core.sampling.params import SamplingParams
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.codec import CODECS
from moaspec_edge.server.service import ServiceOptions, TargetService, wire_encoder

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import tiny
from edge_bench.processes import prompt_ids
from links import Faults, FaultyTransport, Restartable

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 11},
}
FAULTS = Faults(loss=0.03, twice=0.1, delay_s=0.02)
CUT_S = 1.5
"""A device notices after 0.9 s and writes alone for the rest."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="bundled")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[moaspec.Target, MoADrafter, list[list[int]]]:
    """Target, drafter and prompts."""
    if args.tiny:
        return tiny.target(), tiny.agreeing_drafter("llama"), [list(one) for one in tiny.PROMPTS]
    target = moaspec.load_target("smollm2-135m", dtype="float32")
    drafter = moaspec.load_drafter("smollm2-135m", target=target)
    turns = [one.turns[0] for one in read_prompts(args.suite, limit=args.prompts)]
    if len(turns) < args.prompts:
        raise SystemExit(f"{args.suite} has {len(turns)} prompts; name a larger --suite.")
    return target, drafter, [prompt_ids(target.tokenizer, one) for one in turns]


def services(
    args: argparse.Namespace, target: moaspec.Target, drafter: MoADrafter
) -> Callable[[], TargetService]:
    """Makes servers, each of which has forgotten what the one before knew."""
    if args.engine == "torch":
        return lambda: TargetService(target, drafter)
    from moaspec_vllm.vllm_settings import VLLMVerifierSettings
    from moaspec_vllm.vllm_verifier import VLLMVerifier

    options = ServiceOptions(max_tokens=1024)
    data = read_target_spec("smollm2-135m", dtype="float32")
    verifying = VLLMVerifierSettings(
        model=find_weights("smollm2-135m"),
        dtype="float32",
        max_rows=2,
        max_tokens=options.longest(data),
        token_bytes=options.token_bytes(data),
        extra_arguments={"enforce_eager": True},
    )
    engine = VLLMVerifier(verifying, wire_encoder(drafter, data))
    return lambda: TargetService(data, drafter, options, engine=engine)


def cut(transport: FaultyTransport) -> None:
    """Nothing passes for a while, and nobody is told."""

    def mend() -> None:
        transport.hole = False

    transport.hole = True
    asyncio.get_running_loop().call_later(CUT_S, mend)


async def remote_text(
    device: LocalDevice,
    serve: Callable[[], TargetService],
    prompt: list[int],
    *,
    remote: RemoteOptions,
    seed: int,
    options: dict[str, Any],
) -> tuple[list[int], RemoteSession]:
    """The text as a reader of events has it."""
    server = Restartable(serve)
    transport = FaultyTransport(server.transport, FAULTS, seed=seed)
    session = RemoteSession(device, transport, remote)
    text: list[int] = []
    most = options["max_new_tokens"]
    cuts = [most // 4, most // 2, 3 * most // 4]
    async for event in session.stream(prompt, stop_token_ids=(), **options):
        assert event.start <= len(text), "an event left a hole"
        text[event.start :] = event.token_ids
        if cuts and len(text) - event.num_provisional >= cuts[0]:
            cut(transport)
            if cuts.pop(0) == most // 2:
                await server.restart()
    await session.close()
    await server.service.stop()
    return text, session


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """All prompts and settings."""
    target, drafter, prompts = load(args)
    serve, device = services(args, target, drafter), LocalDevice(target, drafter)
    shapes = cycle(product(CODECS, (0, 1, 3)))
    outcomes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for number, (prompt, (setting, chosen)) in enumerate(
        product(prompts[: args.prompts], SETTINGS.items())
    ):
        codec, layers = next(shapes)
        options = {**chosen, "max_new_tokens": args.new_tokens}
        expected = moaspec.generate(target, prompt, stop_token_ids=(), **options).token_ids
        remote = RemoteOptions(
            codec=codec,
            num_target_layers=layers,
            draft="chain:2",
            # Few, so that what is written during one cut does not reach the next one.
            max_provisional=4,
        )
        got, session = await remote_text(
            device, serve, prompt, remote=remote, seed=number, options=options
        )
        outcome = judge(
            target,
            prompt,
            expected,
            got,
            SamplingParams(**chosen),
            max_new_tokens=args.new_tokens,
            stop_token_ids=(),
        ).kind
        outcomes[outcome] += 1
        stats = session.stats
        totals.update(tokens=len(got), cuts=stats.cuts, reopened=stats.reopened)
        totals.update(provisional=stats.provisional, corrected=stats.corrected)
        print(f"{setting:8} {codec} N={layers} {outcome}; {stats.cuts} cuts", flush=True)
    return {"outcomes": dict(outcomes), **totals}


def main() -> None:
    """Compare, and fail where a text is another one."""
    args = parse()
    torch.set_num_threads(1)
    started = time.monotonic()
    found = asyncio.run(run(args))
    print(json.dumps({**found, "seconds": time.monotonic() - started, "torch": torch.__version__}))
    sys.exit(1 if found["outcomes"].get("different") else 0)


if __name__ == "__main__":
    main()
