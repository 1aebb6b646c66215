"""Measurement and storage of the costs of a round on this machine.

A measurement holds for one machine, target, drafter, dtype, quantisation, device and number of
threads. Its file is named by a fingerprint of them. Only `calibrate` measures.
"""

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moaspec.backends.cpu.build import instructions
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.calibration.assumed_costs import DECIDE_S
from moaspec.calibration.round_parts import RoundParts, TimedPart, TimedRounds
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target, plain_torch
from moaspec_core.checkpoint.drafter_config import inner_size
from moaspec_core.checkpoint.user_files import read_json
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError
from moaspec_core.policy.cost_model import CostTable
from moaspec_core.support.paths import make_private, trusted

FORMAT_VERSION = 12
TOKENS = (1, 2, 3, 4, 5, 6, 8, 9, 16, 32, 64)
"""Tokens of the measured passes. Costs of small ones rise in steps, such as from 8 to 9."""
WIDTHS = (1, 2, 3, 4, 6, 8)
CONTEXTS = (64, 1024)
LEVELS = 3
"""Levels of the timed trees. Each level below the first counts as an equal part of the rest."""
ROWS = 4  # rows drafted for together, to tell the cost of each further one
DRAFTS = 2  # length of the drafts in timed whole rounds
WARM_UPS = 1


@dataclass(frozen=True)
class Turns:
    """Number of turns. Every part is timed once per turn, and its lower quartile counts.

    Other processes only make times longer, and all parts alike where they take seconds. The first
    turn does not count.
    """

    # least, most: limits of the number.
    least: int
    most: int
    enough_s: float  # seconds after which the measurement ends when `least` turns are done


TURNS = Turns(least=5, most=15, enough_s=10.0)
QUICK_TURNS = Turns(least=3, most=5, enough_s=3.0)


def calibrate(
    target: Target,
    drafter: MoADrafter | None = None,
    *,
    num_target_layers: int | None = None,
    quick: bool = False,
    advance: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CostTable:
    """Measure target and drafter, and store the result for `tree="auto"`.

    It takes some ten seconds for SmolLM2-135M on two cores. Nothing else should run meanwhile:
    costs measured while other processes used the CPU are marked as `busy`, `tree="auto"` measures
    them again when it finds the CPU free, and they replace no costs that are not.

    Args:
        target: in the dtype and on the device that it will be used with.
        drafter: None measures the target alone.
        num_target_layers: N; None measures each that the drafter was trained for.
        quick: measure fewer times; see `QUICK_TURNS`.
        advance: called with a description of the progress.
        stopped: called before each part is timed; True ends the measurement early.

    Returns:
        The costs with N, or with the drafter's default; `stored_costs` has those for its
        other N.

    Raises:
        InputError: N outside the target's layers.
        KeyboardInterrupt: stopped in the first turn, which does not count.
    """
    numbers: Sequence[int | None] = [num_target_layers]
    if drafter is not None and num_target_layers is None:
        numbers = drafter.config.num_target_layers
    proposers = []
    if drafter is not None:
        proposers = [FastMoAProposer(drafter, target, num_target_layers=n) for n in numbers]
    tables = _measured(target, proposers, QUICK_TURNS if quick else TURNS, advance, stopped)
    for n, costs in zip(numbers, tables, strict=True):
        before = stored_costs(target, drafter, num_target_layers=n)
        if before is None or before.busy or not costs.busy:
            _store(costs, fingerprint(target, drafter, n))
    return tables[0]


def _store(costs: CostTable, info: dict[str, Any]) -> None:
    path = _path(info)
    make_private(path.parent)
    content = {"format_version": FORMAT_VERSION, "of": info, "costs": asdict(costs)}
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.touch(0o600)  # as `trusted` asks, under any umask
        made.write_text(json.dumps(content, indent=1), encoding="utf-8")
        made.replace(path)


def stored_costs(
    target: Target, drafter: MoADrafter | None = None, *, num_target_layers: int | None = None
) -> CostTable | None:
    """The costs that `calibrate` stored for exactly this setting, or None."""
    path = _path(fingerprint(target, drafter, num_target_layers))
    try:
        content = read_json(path)
        costs: dict[str, Any] = content["costs"]
        costs["pass_s"] = tuple(tuple(line) for line in costs["pass_s"])
        costs = {k: tuple(v) if isinstance(v, list) else v for k, v in costs.items()}
        return CostTable(**costs) if content["format_version"] == FORMAT_VERSION else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InputError):
        # A damaged file is replaced by the next measurement.
        return None


def fingerprint(
    target: Target, drafter: MoADrafter | None = None, num_target_layers: int | None = None
) -> dict[str, Any]:
    """What costs depend on."""
    info: dict[str, Any] = {
        "machine": machine(target.device),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": target.identity.as_dict(),
        "inner": inner_size(target.config),
        "dtype": target.precision,
        "packed": target.packed,
        "kernels": instructions() if target.packed else None,
        "graphs": target.layers.records,
    }
    if drafter is not None:
        sizes = asdict(drafter.config)
        default = sizes["num_target_layers"][0]
        ids = drafter.draft_token_ids
        names = ("layer_self_attention", "self_attention", "cross_attention")
        info["drafter"] = {name: sizes[name] for name in (*names, "self_attention_layers")} | {
            "num_target_layers": default if num_target_layers is None else num_target_layers,
            "draft_vocabulary": None if ids is None else len(ids),
            "exits": len(drafter.exits),
            "without": list(sizes["without"]),
        }
    return info


def machine(device: torch.device) -> str:
    """Name of the processor that runs the target."""
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
        pass  # Not Linux: use the name from `platform`.
    return name


def _path(info: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
    return trusted("calibration", f"{digest[:24]}.json")


@plain_torch()
@torch.inference_mode()
def _measured(
    target: Target,
    proposers: Sequence[FastMoAProposer],
    turns: Turns,
    advance: Callable[[str], None],
    stopped: Callable[[], bool],
) -> list[CostTable]:
    """One table for each N, or one of the target alone.

    All are timed in the same turns, so that they can be compared.
    """
    benches = [RoundParts(target, proposer) for proposer in proposers] or [RoundParts(target, None)]
    common = _TargetParts(benches[0])
    drafts = [_DraftParts(bench) for bench in benches if bench.proposer is not None]
    parts = [*common.parts, *chain(*(draft.parts for draft in drafts))]
    crowded: list[bool] = []
    for (turn, left), part in ((turn, part) for turn in _numbered(turns) for part in parts):
        if stopped():
            if turn < WARM_UPS:
                raise KeyboardInterrupt
            if turn > WARM_UPS:  # every part was timed once
                break
        if part is parts[0]:
            advance(f"all parts, for the {turn + 1}. time{left}")
        part.time(counts=turn >= WARM_UPS)
        if part is parts[-1]:
            crowded.append(target.crowded)
    # What counts stands as long as fewer than half of the turns were disturbed.
    costs = replace(common.costs(), busy=2 * sum(crowded) >= len(crowded))
    return [draft.added_to(costs) for draft in drafts] or [costs]


class _TargetParts:
    """Parts of a round that drafts with any N have in common."""

    def __init__(self, bench: RoundParts) -> None:
        room = bench.target.max_positions - max(TOKENS)
        self._contexts = tuple(c for c in CONTEXTS if c <= room) or (1,)
        self._passes = [
            [bench.target_pass(n, context) for n in TOKENS] for context in self._contexts
        ]
        self._heads, self._rounds = [bench.head(n) for n in TOKENS], TimedRounds(bench, None)
        self._logits = [bench.head(n, logits=True) for n in TOKENS]
        self.parts: list[TimedPart | TimedRounds] = [
            *chain(*self._passes),
            *self._heads,
            *self._logits,
            self._rounds,
        ]

    def costs(self) -> CostTable:
        costs = CostTable(
            contexts=self._contexts,
            tokens=TOKENS,
            pass_s=tuple(_rising([part.usual_s for part in line]) for line in self._passes),
            head_s=_rising([part.usual_s for part in self._heads]),
            logits_s=_rising([part.usual_s for part in self._logits]),
            root_s=0.0,
            widths=(),
            step_s=(),
            encode_s=(0.0,) * len(TOKENS),
        )
        return replace(costs, plain_rest_s=self._rounds.rest_s(costs))


class _DraftParts:
    """Parts of a round that belong to drafts with one N."""

    def __init__(self, bench: RoundParts) -> None:
        assert bench.proposer is not None
        self._widths = tuple(w for w in WIDTHS if w <= bench.proposer.vocabulary)
        self._root, self._roots = bench.draft(Chain(1)), bench.draft(Chain(1), ROWS)
        self._grown = [(bench.draft(_one_level(w)), bench.draft(_grown(w))) for w in self._widths]
        self._encoded = [bench.encode(n) for n in TOKENS]
        self._rounds = TimedRounds(bench, Chain(DRAFTS))
        self.parts: list[TimedPart | TimedRounds] = [
            self._root,
            self._roots,
            *chain(*self._grown),
            *self._encoded,
            self._rounds,
        ]

    def added_to(self, costs: CostTable) -> CostTable:
        levels = LEVELS - 1
        # Timed twice in each turn, so that a short disturbance counts less.
        root_s = min(part.usual_s for part in (self._root, *(step for step, _ in self._grown[:1])))
        costs = replace(
            costs,
            root_s=root_s,
            row_s=max(0.0, self._roots.usual_s - root_s) / (ROWS - 1),
            widths=self._widths,
            step_s=_rising(
                [(many.usual_s - single.usual_s) / levels for single, many in self._grown]
            ),
            encode_s=_rising([part.usual_s for part in self._encoded]),
            decide_s=DECIDE_S,
        )
        return replace(costs, draft_rest_s=self._rounds.rest_s(costs))


def _numbered(turns: Turns) -> Iterator[tuple[int, str]]:
    """The number of each turn, and a text that estimates the time left."""
    started = time.perf_counter()
    yield 0, ""
    for turn in range(1, WARM_UPS + turns.most):
        elapsed = time.perf_counter() - started
        if turn < WARM_UPS + turns.least or elapsed < turns.enough_s:
            turn_s = elapsed / turn
            whole_s = max((WARM_UPS + turns.least) * turn_s, turns.enough_s)
            left_s = min(whole_s, (WARM_UPS + turns.most) * turn_s) - elapsed
            yield turn, f", about {left_s:.0f} s left"


def _one_level(width: int) -> Tree:
    return Tree(1, width, width)


def _grown(width: int) -> Tree:
    return Tree(LEVELS, width, width * LEVELS)


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """The nearest times that rise with the amount of work: other processes disturb the measurement.

    Times that fall are replaced by their mean (isotonic regression), so that one of them that is
    too long does not make the ones after it look free.
    """
    levels: list[tuple[float, int]] = []  # times, and how many each stands for
    for second in seconds:
        value, count = max(0.0, second), 1
        while levels and levels[-1][0] > value:
            before, number = levels.pop()
            value = (value * count + before * number) / (count + number)
            count += number
        levels.append((value, count))
    return tuple(value for value, count in levels for _ in range(count))
