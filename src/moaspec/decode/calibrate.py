"""Measure once what each part of a round costs on this machine, and remember it.

A measurement belongs to one machine, target, drafter, dtype, device and number of threads; a
fingerprint of all of them names its file. Nothing is measured behind a caller's back: only when
`calibrate` is called.

Legend: B rows (one here), T tokens, L layers, K one layer's key and value.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moaspec.decode.cache import tree_mask
from moaspec.decode.cost import CostTable
from moaspec.decode.moa import MoADrafting
from moaspec.decode.protocols import RowText
from moaspec.decode.tree import Chain, Tree
from moaspec.decode.verifier import LocalVerifier
from moaspec.errors import InputError
from moaspec.model import MoADrafter
from moaspec.places import cache_dir
from moaspec.target import Target

FORMAT_VERSION = 3
TOKENS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (1, 2, 3, 4, 6, 8)
CONTEXTS = (64, 1024)
LEVELS = 3
"""Levels of the trees whose growth is timed; what they cost beyond one level is shared out."""
WARM_UPS, REPEATS = 2, 5
"""Of which the median counts: one hiccup of the machine must not decide for months."""


def calibrate(
    target: Target,
    drafter: MoADrafter | None = None,
    *,
    num_target_layers: int | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> CostTable:
    """Measure target and drafter, and store the result for `tree="auto"`.

    It takes some ten seconds for SmolLM2-135M on two cores. Nothing else should run meanwhile.

    Args:
        target: in the dtype and on the device that it will be used with.
        drafter: None measures the target alone.
        num_target_layers: N; None takes the drafter's default.
        advance: called with the name of each part before it is measured.

    Raises:
        InputError: N outside the target's layers.
    """
    drafting = (
        None
        if drafter is None
        else MoADrafting(drafter, target, num_target_layers=num_target_layers)
    )
    costs = _measured(target, drafting, advance)
    facts = fingerprint(target, drafter, num_target_layers)
    path = _path(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format_version": FORMAT_VERSION, "of": facts, "costs": asdict(costs)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
        json.dump(content, scratch, indent=1)
    Path(scratch.name).replace(path)
    return costs


def stored_costs(
    target: Target, drafter: MoADrafter | None = None, *, num_target_layers: int | None = None
) -> CostTable | None:
    """What `calibrate` stored for exactly this setting, or None."""
    path = _path(fingerprint(target, drafter, num_target_layers))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        costs: dict[str, Any] = content["costs"]
        costs["pass_s"] = tuple(tuple(line) for line in costs["pass_s"])
        costs = {k: tuple(v) if isinstance(v, list) else v for k, v in costs.items()}
        return CostTable(**costs) if content["format_version"] == FORMAT_VERSION else None
    except (OSError, ValueError, KeyError, TypeError, InputError):
        # Whatever is wrong with it, measuring anew puts it right.
        return None


def fingerprint(
    target: Target, drafter: MoADrafter | None = None, num_target_layers: int | None = None
) -> dict[str, Any]:
    """Everything that costs depend on."""
    facts: dict[str, Any] = {
        "machine": machine(target.device),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": asdict(target.identity),
        "inner": int(target.config.intermediate_size),
        "dtype": str(target.dtype),
        "packed": target.packed,
        "kernels": target.fused is not None,
    }
    if drafter is not None:
        sizes = asdict(drafter.config)
        default = sizes["num_target_layers"][0]
        ids = drafter.draft_token_ids
        names = ("layer_self_attention", "self_attention", "cross_attention")
        facts["drafter"] = {name: sizes[name] for name in names} | {
            "num_target_layers": default if num_target_layers is None else num_target_layers,
            "draft_vocabulary": None if ids is None else len(ids),
            "exits": len(drafter.exits),
            "without": list(sizes["without"]),
        }
    return facts


def machine(device: torch.device) -> str:
    """The processor that does the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu()


@cache
def _cpu() -> str:
    """Model name of the CPU, with its cores: the same model may lend fewer of them."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # Not Linux: what platform knows has to do.
    return name


def _path(facts: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "calibration" / f"{digest[:24]}.json"


@torch.inference_mode()
def _measured(
    target: Target, drafting: MoADrafting | None, advance: Callable[[str], None]
) -> CostTable:
    bench = Bench(target, drafting)
    longest = max(TOKENS)
    contexts = tuple(c for c in CONTEXTS if c + longest <= target.max_positions) or (1,)
    passes = []
    for context in contexts:
        advance(f"target, {context} tokens of context")
        passes.append(_rising([bench.target_pass(n, context) for n in TOKENS]))
    advance("head")
    head_s = _rising([bench.head(n) for n in TOKENS])
    advance("drafter")
    first_s = bench.draft(Chain(1)) if drafting is not None else 0.0
    widths = tuple(w for w in WIDTHS if drafting is not None and w <= drafting.vocabulary)
    steps = [(bench.draft(_grown(w)) - bench.draft(_one_level(w))) / (LEVELS - 1) for w in widths]
    advance("encoder")
    encode_s = [bench.encode(n) if drafting is not None else 0.0 for n in TOKENS]
    return CostTable(
        contexts=contexts,
        tokens=TOKENS,
        pass_s=tuple(passes),
        head_s=head_s,
        root_s=first_s,
        widths=widths,
        step_s=_rising(steps),
        encode_s=_rising(encode_s),
    )


def _one_level(width: int) -> Tree:
    return Tree(1, width, width)


def _grown(width: int) -> Tree:
    return Tree(LEVELS, width, width * LEVELS)


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """More work never takes less time; where it seemed to, something else was running."""
    return tuple(np.maximum.accumulate([max(0.0, s) for s in seconds]).tolist())


@dataclass(frozen=True)
class Bench:
    """Runs each part by itself, on made-up tokens: costs do not depend on which they are.

    Attributes:
        target: what is timed.
        drafting: the same; None where only the target is.
        seconds: times a call on a device; before each time, another call that does not count.
    """

    target: Target
    drafting: MoADrafting | None
    seconds: Callable[..., float] = field(
        default=lambda run, device, before=None: statistics.median(
            times(run, device, before=before)
        )
    )

    def target_pass(self, num_tokens: int, context: int) -> float:
        """Seconds of a pass over so many tokens after `context` others, without the head."""
        return self.seconds(self._pass(num_tokens, context), self.target.device)

    def _pass(self, num_tokens: int, context: int) -> Callable[[], None]:
        target, device = self.target, self.target.device
        cache = LocalVerifier(target).cache
        visible = context + num_tokens
        cache.reserve(1, visible)
        positions_1T = torch.arange(context, visible, device=device)[None]
        chain_1TT = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=device).tril()

        def run() -> None:
            target.run(
                torch.zeros_like(positions_1T),
                positions_1T,
                mask_B1TS=tree_mask([context], chain_1TT, visible),
                write=cache.writer([0], [context], num_tokens, visible),
            )

        return run

    def head(self, num_tokens: int) -> float:
        """Seconds of the head and the choice."""
        width = int(self.target.config.hidden_size)
        states = torch.zeros(num_tokens, width, dtype=self.target.dtype, device=self.target.device)
        return self.seconds(lambda: self.target.best(states), self.target.device)

    def draft(self, shape: Tree) -> float:
        """Seconds of growing a tree over a text of the first context length."""
        assert self.drafting is not None
        drafting, length = self.drafting, min(CONTEXTS[0], self.target.max_positions // 2)
        drafting.borrow(LocalVerifier(self.target).cache)
        drafting.close(0)
        drafting.observe(0, self._features(length - 1))
        row = RowText(0, [0] * length)

        def run() -> None:
            drafting.read[0] = length - 1
            drafting.propose([row], shape)

        # In a round, the target's weights have just gone through the caches.
        return self.seconds(run, self.target.device, self._pass(1, 1))

    def encode(self, num_tokens: int) -> float:
        """Seconds of encoding so many verified tokens."""
        run = partial(self._features, num_tokens)
        return self.seconds(run, self.target.device, self._pass(1, 1))

    def _features(self, num_tokens: int) -> Any:
        assert self.drafting is not None
        target = self.target
        kv_1TLK = torch.zeros(
            (1, num_tokens, target.num_layers, target.identity.kv_size),
            dtype=target.dtype,
            device=target.device,
        )
        positions = torch.arange(num_tokens, device=target.device)[None]
        (features,) = self.drafting.encode(kv_1TLK, positions, [num_tokens])
        return features


def times(
    run: Callable[[], object],
    device: torch.device,
    repeats: int = REPEATS,
    *,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Seconds of repeated runs, after some that do not count, each with an untimed one before."""
    for _ in range(WARM_UPS):
        run()
    seconds = []
    for _ in range(repeats):
        if before is not None:
            before()
        _synchronise(device)
        started = time.perf_counter()
        run()
        _synchronise(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
