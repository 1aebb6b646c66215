"""Capacity of fleets: `python -m fleet_sim record | tables | failure | check`, below `tools`.

    moaspec calibrate --threads 2
    PYTHONPATH=tools python -m fleet_sim record --suite spec_bench.jsonl   # traces.json
    PYTHONPATH=tools python -m fleet_sim tables
    PYTHONPATH=tools python -m fleet_sim failure
    PYTHONPATH=tools python -m fleet_sim check --scale 8                   # real runs beside it

Every command ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import moaspec
from fleet_sim import real_runs, traces
from fleet_sim.simulation import Fleet, Measured, Mode, simulate
from moaspec.calibration.measure_costs import stored_costs
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.policy.cost_model import CostTable
from moaspec_edge.emulation import link_named

FLEETS = ((10, 1), (32, 1), (100, 1), (320, 10), (1_000, 10), (10_000, 100), (100_000, 1_000))
CELL = 10
"""Servers that are simulated at most: a larger fleet is many such cells."""
GPU_PASS_S = 0.02
"""Assumed for --assumed-gpu: a pass over one token."""

TOKENS, PASSES = (1, 2, 4, 5, 8, 16, 64), (1.0, 1.02, 1.05, 1.06, 1.1, 1.2, 1.7)
"""Widths of passes, and what these cost in passes over one token: weights are read once for all."""
LONGEST_PROMPT = 512


def main() -> None:
    """Run a command."""
    args = parsed()
    if args.command == "record":
        record(args)
        return
    known = Path(args.traces) if args.traces else traces.TRACES
    fleet = Fleet(
        mode="plain",
        devices=1,
        servers=1,
        costs=costs_of(args),
        traces=traces.load(known),
        link=link_named(args.link),
        step_s=args.step_ms / 1e3,
        token_bytes=args.token_bytes,
        row_s=args.row_us / 1e6,
        rate=args.rate,
        seconds=args.seconds,
        warm_s=args.warm_s,
    )
    found = {"tables": tables, "failure": failures, "check": check}[args.command](fleet, args)
    print(json.dumps({"fleet_sim": args.command, "options": vars(args), "found": found}))


def parsed() -> argparse.Namespace:
    """Read the command line."""
    options = argparse.ArgumentParser(description=__doc__, prog="fleet_sim")
    options.add_argument("command", choices=("record", "tables", "failure", "check"))
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--suite", default="bundled", help="Of record.")
    options.add_argument("--limit", type=int, default=48, help="Of record: prompts.")
    options.add_argument("--max-new-tokens", type=int, default=96, help="Of record.")
    options.add_argument("--traces", help="A file of record; default: the one that lies here.")
    options.add_argument("--costs", help="A file of moaspec calibrate; default: this machine's.")
    options.add_argument("--assumed-gpu", action="store_true", help="Costs that nobody measured.")
    options.add_argument("--modes", nargs="+", default=["plain", "ahead"])
    options.add_argument("--scale", type=float, default=1.0, help="A server so many times slower.")
    options.add_argument("--link", default="lan")
    options.add_argument("--step-ms", type=float, default=10.0, help="Of a drafted token.")
    options.add_argument("--token-bytes", type=int, default=396, help="Of its activations.")
    options.add_argument("--row-us", type=float, default=700.0, help="A row, besides its pass.")
    options.add_argument("--rate", type=float, default=0.45, help="Of right drafts, at first.")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--warm-s", type=float, default=40.0)
    options.add_argument("--fleets", nargs="+", help="Of tables: DEVICES:SERVERS.")
    options.add_argument("--per-server", type=int, nargs="+", default=[32, 100], help="Of failure.")
    options.add_argument("--runs", nargs="+", default=CHECKS, help="Of check: MODE:DEVICES:SERVERS")
    options.add_argument("--skipping", action="store_true", help="Of check: see run_skipping.")
    options.add_argument("--real-model", action="store_true", help="Of check: real passes.")
    return options.parse_args()


def record(args: argparse.Namespace) -> None:
    """Record traces of the bundled drafter."""
    torch.set_num_threads(args.threads)
    target = moaspec.load_target(args.model)
    drafter = moaspec.load_drafter(args.model, target=target)
    prompts = [
        chat_ids(target, prompt.turns[0]) for prompt in read_prompts(args.suite, limit=args.limit)
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT]
    traces.save(traces.record(target, drafter, prompts, args.max_new_tokens))


def costs_of(args: argparse.Namespace) -> CostTable:
    """The measured costs of a server."""
    if args.assumed_gpu:
        free = (0.0,) * len(TOKENS)
        costs = CostTable(
            contexts=(1,),
            tokens=TOKENS,
            pass_s=(tuple(GPU_PASS_S * one for one in PASSES),),
            head_s=free,
            root_s=0.0,
            widths=(1,),
            step_s=(0.0,),
            encode_s=tuple(0.05 * GPU_PASS_S * one for one in PASSES),
        )
    elif args.costs:
        costs = real_runs.table(json.loads(Path(args.costs).read_text(encoding="utf-8"))["costs"])
    else:
        torch.set_num_threads(args.threads)
        target = moaspec.load_target(args.model)
        stored = stored_costs(target, moaspec.load_drafter(args.model, target=target))
        if stored is None:
            raise SystemExit(
                f"This machine is not measured: moaspec calibrate --threads {args.threads}"
            )
        costs = stored
    return real_runs.scaled(costs, args.scale)


def figures(found: Measured, fleet: Fleet) -> dict[str, float]:
    """Speed and times after the warm-up."""
    start_s, stop_s = fleet.warm_s, fleet.warm_s + fleet.seconds
    p50, p99 = found.token_s(start_s, stop_s)
    return {
        "tokens_per_server_s": found.tokens_per_s(start_s, stop_s) / fleet.servers,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "rows_per_pass": found.rows(start_s, stop_s),
    }


def tables(fleet: Fleet, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fleets without device drafting and with it."""
    sizes = [tuple(map(int, one.split(":"))) for one in args.fleets or ()] or FLEETS
    print("| devices | servers | | tokens per server second | p50, ms per token | p99 | rows |")
    print("|---|---|---|---|---|---|---|")
    rows, known = [], dict[tuple[int, int, Mode], dict[str, float]]()
    for devices, servers in sizes:
        cell = min(servers, CELL)
        mode: Mode
        for mode in args.modes:
            key = devices * cell // servers, cell, mode
            if key not in known:
                one = replace(fleet, mode=mode, devices=key[0], servers=cell)
                known[key] = figures(simulate(one), one)
            rows.append({"devices": devices, "servers": servers, "mode": mode} | known[key])
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"| {row['devices']:,} | {row['servers']:,} | {row['mode']} "
        f"| {row['tokens_per_server_s']:.0f} | {row['p50_ms']:.0f} | {row['p99_ms']:.0f} "
        f"| {row['rows_per_pass']:.1f} |"
    )


def failures(fleet: Fleet, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Servers of a cell fail together: a tenth, and three tenths."""
    print(
        "| devices per server | fails | | tokens/s before | worst second | after | back after, s "
        "| p99 before, ms | p99 in 10 s | first token of the lost, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    mode: Mode
    for per_server in args.per_server:
        for lost in (1, 3):
            for mode in args.modes:
                one = replace(fleet, mode=mode, devices=per_server * CELL, servers=CELL, lost=lost)
                rows.append(failure(one))
                told = rows[-1]
                print(
                    f"| {per_server} | {lost} of {CELL} | {mode} | {told['before']:.0f} "
                    f"| {told['worst']:.0f} | {told['after']:.0f} | {told['back_s']:.0f} "
                    f"| {told['p99_before_ms']:.0f} | {told['p99_ms']:.0f} "
                    f"| {told['lost_s']:.1f} |",
                    flush=True,
                )
    return rows


def failure(fleet: Fleet) -> dict[str, Any]:
    """Speed by second around the failure of some servers."""
    found, at_s = simulate(fleet), fleet.warm_s + fleet.seconds / 2
    stop_s = fleet.warm_s + fleet.seconds
    by_second = [found.tokens_per_s(at_s + i, at_s + i + 1) for i in range(int(stop_s - at_s))]
    after = found.tokens_per_s(stop_s - fleet.seconds / 8, stop_s)
    back = next((i for i, one in enumerate(by_second) if i and one >= 0.95 * after), len(by_second))
    lost = sorted(seconds for at, seconds, _, was_lost in found.pieces if was_lost and at > at_s)
    return {
        "mode": fleet.mode,
        "devices": fleet.devices,
        "servers": fleet.servers,
        "lost": fleet.lost,
        "before": found.tokens_per_s(fleet.warm_s, at_s),
        "worst": min(by_second),
        "after": after,
        "back_s": back,
        "p99_before_ms": 1e3 * found.token_s(fleet.warm_s, at_s)[1],
        "p99_ms": 1e3 * found.token_s(at_s, at_s + 10.0)[1],
        "lost_s": lost[len(lost) // 2] if lost else float("nan"),
    }


CHECKS = (
    *("plain:16:1", "plain:64:1", "plain:64:3"),
    *("sync:4:1", "sync:16:1", "sync:64:1", "sync:64:2", "sync:16:3", "sync:64:3"),
)


def check(fleet: Fleet, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Real runs and what the simulation says of them.

    A first real run of 8 devices on one server, of which nothing is predicted, tells the CPU times
    that belong to no pass. With --skipping, real sessions run without waiting instead.
    """
    if args.skipping:
        return skipping(fleet, args)
    seconds, rows = fleet.warm_s + fleet.seconds, []
    own: dict[str, tuple[float, float]] = {}
    for told in ("plain:8:1", "sync:8:1", *args.runs):
        mode, devices, servers = told.split(":")
        one = replace(
            fleet,
            mode=mode,
            devices=int(devices),
            servers=int(servers),
            link=link_named("none"),
            token_bytes=0,
            together=True,
            sticky=True,
        )
        real = real_runs.run(
            fleet.traces,
            fleet.costs,
            mode=mode,
            devices=one.devices,
            servers=one.servers,
            step_s=fleet.step_s,
            seconds=seconds,
            rate=fleet.rate,
            model=args.model if args.real_model else None,
        )
        known = mode in own
        own.setdefault(mode, (real.row_s, real.turn_s))
        row_s, turn_s = own[mode]
        guess = simulate(replace(one, row_s=row_s, turn_s=turn_s))
        pair = {"real": figures(real.found, one), "predicted": figures(guess, one)}
        info = {"run": told, "first": not known, "row_us": 1e6 * real.row_s}
        info |= {"turn_us": 1e6 * real.turn_s} | pair
        ratios = {k: pair["predicted"][k] / pair["real"][k] for k in pair["real"]}
        rows.append(info | {"ratio": ratios})
        print(
            f"{told:12}"
            + "  ".join(
                f"{name} {pair['real'][name]:.1f} predicted {pair['predicted'][name]:.1f} "
                f"({ratio:.2f})"
                for name, ratio in ratios.items()
            )
            + f"  row {1e6 * real.row_s:.0f} us, turn {1e6 * real.turn_s:.0f} us"
            + ("" if known else "  (measures these)"),
            file=sys.stderr,
            flush=True,
        )
    return rows


def skipping(fleet: Fleet, args: argparse.Namespace) -> list[dict[str, Any]]:
    """As `check`, in one event loop that skips waiting."""
    rows = []
    for told in args.runs:
        mode, devices, servers = told.split(":")
        one = replace(
            fleet,
            mode=mode,
            devices=int(devices),
            servers=int(servers),
            token_bytes=0,
            sticky=True,
        )
        real, guess = figures(real_runs.run_skipping(one), one), figures(simulate(one), one)
        ratios = {name: guess[name] / real[name] for name in real}
        rows.append({"run": told, "real": real, "predicted": guess, "ratio": ratios})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
