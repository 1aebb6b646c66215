"""Measure what drafts gain, and write docs/gains.md and README's table from the runs that are kept.

    python tools/gains.py measure --name NAME [--model FILE --drafter DIR --suite spec-bench ...]
    python tools/gains.py page

`measure` decodes the same prompts plainly and with drafts, one at a time and several at once, in
one process each (`moaspec eval`), and keeps the figures in docs/results/NAME.json, with processor,
kernels and commit. Killed, the same command goes on where it was. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs/results"
PAGE = ROOT / "docs/gains.md"
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- gains: made by `make gains` -->\n).*?(<!-- end of gains -->)", re.DOTALL)
COLUMNS = (
    "model",
    "machine",
    "prompts at once",
    "tokens/s without drafts",
    "tokens/s with drafts",
    "gain",
    "tau",
)
BUSY = 0.5  # load average from which other programs disturbed a run


def main() -> None:
    """Read the arguments; measure, or write the page."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = options.add_subparsers(dest="command", required=True)
    commands.add_parser("page", help="write docs/gains.md and README's table")
    run = commands.add_parser("measure", help="make a run and keep it")
    run.add_argument("--name", required=True, help="of the file below docs/results")
    run.add_argument("--model", default="smollm2-135m")
    run.add_argument("--drafter", default="", help="default: the model's bundled one")
    run.add_argument("--suite", default="bundled", help="as for `moaspec eval`")
    run.add_argument("--limit", type=int, help="prompts, spread over the categories")
    run.add_argument("--at-once", default="1,4,16", help="numbers of prompts decoded together")
    run.add_argument("--max-new-tokens", type=int, default=128)
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--dtype", default="bfloat16")
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--out", type=Path, default=ROOT / "results", help="of unfinished runs")
    run.add_argument("--keep", type=Path, default=RUNS, help="directory of finished runs")
    run.add_argument("--no-calibrate", action="store_true", help="use the costs that are stored")
    args = options.parse_args()
    if args.command == "page":
        write_pages(read_runs(), PAGE, README)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measure all loads and keep the run."""
    from moaspec.backends.cpu.build import instructions

    load = round(os.getloadavg()[0], 1)
    work = args.out / args.name
    work.mkdir(parents=True, exist_ok=True)
    model = ["--model", args.model, *(["--drafter", args.drafter] if args.drafter else [])]
    model += ["--dtype", args.dtype, "--threads", str(args.threads)]
    if not args.no_calibrate and not any(work.iterdir()):
        _moaspec("calibrate", *model)
    reports = {
        at_once: _measured(args, model, work / f"at-once-{at_once}", at_once)
        for at_once in map(int, args.at_once.split(","))
    }
    info = next(iter(reports.values()))
    run = {
        "model": Path(args.model).name,
        "drafter": Path(args.drafter or args.model).name,
        "suite": Path(args.suite).stem,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "dtype": info["dtype"],
        "threads": info["threads"],
        "machine": info["machine"],
        "kernels": instructions() or "none",
        "load": load,  # of the machine before, by its other programs
        "versions": info["versions"],
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "packages")),
        "date": datetime.now(UTC).date().isoformat(),
        "loads": [load_of(at_once, report) for at_once, report in reports.items()],
    }
    kept = args.keep / f"{args.name}.json"
    kept.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    print(f"Kept in {kept}. `make gains` writes it into docs/gains.md and README.md.")


def _measured(
    args: argparse.Namespace, model: Sequence[str], out: Path, at_once: int
) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    suite = out / f"{Path(args.suite).stem}.jsonl"
    suite.write_text("".join(_rows(args.suite, args.limit, at_once)), encoding="utf-8")
    options = ["--suite", str(suite), "--methods", "plain,moa", "--batch", str(at_once)]
    options += ["--max-new-tokens", str(args.max_new_tokens), "--repeats", str(args.repeats)]
    _moaspec("eval", *model, *options, "--out", str(out / "eval"))
    info: dict[str, Any] = json.loads((out / "eval/report.json").read_text(encoding="utf-8"))
    return info


def _rows(suite: str, limit: int | None, at_once: int) -> Iterable[str]:
    """First turns as a suite's lines; prompts are repeated until they fill every batch."""
    from moaspec.evaluate.prompt_suites import read_prompts

    prompts = read_prompts(suite, limit=limit, max_turns=1)
    total = -(-len(prompts) // at_once) * at_once
    for number, prompt in enumerate(itertools.islice(itertools.cycle(prompts), total)):
        row = {"turns": prompt.turns, "category": prompt.category, "question_id": number}
        yield json.dumps(row) + "\n"


def load_of(at_once: int, report: Mapping[str, Any]) -> dict[str, Any]:
    """What a run keeps of one report of `moaspec eval`."""
    plain, drafted = report["methods"]["plain"], report["methods"]["moa"]
    repeats = zip(drafted["tokens_per_s_by_repeat"], plain["tokens_per_s_by_repeat"], strict=True)
    lossless = plain["lossless"] and drafted["lossless"]
    return {
        "at_once": at_once,
        "prompts": drafted["num_prompts"],
        "tokens": drafted["tokens"],
        "plain_tokens_per_s": plain["tokens_per_s"],
        "drafted_tokens_per_s": drafted["tokens_per_s"],
        "gain_by_repeat": [with_drafts / without for with_drafts, without in repeats],
        "tau": drafted["tau"],
        "lossless": lossless,
        "ties": drafted["ties"],
    }


def read_runs() -> list[dict[str, Any]]:
    """The runs that are kept, by name."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(RUNS.glob("*.json"))]


def write_pages(runs: Sequence[Mapping[str, Any]], page: Path, readme: Path) -> None:
    """Write the page, and the same table into README between its marks."""
    page.write_text(whole_page(runs), encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    if not TABLE.search(text):
        sys.exit(f"{readme} has no marks for the table.")
    readme.write_text(
        TABLE.sub(lambda found: f"{found[1]}\n{table(runs)}\n{found[2]}", text), encoding="utf-8"
    )


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each run and load."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [_row(run, load) for run in runs for load in run["loads"]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(run: Mapping[str, Any], load: Mapping[str, Any]) -> tuple[str, ...]:
    gain = load["drafted_tokens_per_s"] / load["plain_tokens_per_s"]
    return (
        f"`{run['model']}`",
        machine(run),
        str(load["at_once"]),
        f"{load['plain_tokens_per_s']:.0f}",
        f"{load['drafted_tokens_per_s']:.0f}",
        f"{gain:.2f}x" if load["lossless"] else "lossy",
        "" if load["tau"] is None else f"{load['tau']:.2f}",
    )


def machine(run: Mapping[str, Any]) -> str:
    """Processor, kernels, dtype and threads."""
    processor = run["machine"]["gpu"] or re.sub(r"\(R\)|\(TM\)", "", run["machine"]["processor"])
    threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
    busy = " (busy)" if run["load"] > BUSY else ""
    return f"{processor}{busy}, kernels {run['kernels']}, {run['dtype']}, {threads}"


def whole_page(runs: Sequence[Mapping[str, Any]]) -> str:
    """docs/gains.md."""
    described = "".join(f"{_description(run)}\n" for run in runs)
    return f"""# What will I gain?

All speeds of moaspec's own decoding are on this page; other pages link to it. It is generated from
the runs in `docs/results`. Gains do not transfer between machines and models: [measure
yours](#measure-yours).

{table(runs)}
- **tokens/s**: all generated tokens over all seconds, prompts included; the median repeat.
- **gain**: with drafts over without, both by moaspec in one process. Below 1.00x drafts cost time.
- **tau**: tokens per pass of the target in rounds. 1.00, or nothing: no drafts were verified.
- Decoding is greedy. Every text is compared with the target's
  ([how](evaluation.md#metrics)); "lossy" stands where one differs, in place of the gain.
- **busy**: other programs ran meanwhile, so the speeds are too low and the gain is rough.

## What changes the gain

- **Load.** A pass over many prompts keeps the processor busy, so drafts cost more: `tree="auto"`
  drafts less, then nothing ([how it decides](performance.md#how-treeauto-decides)).
- **Size.** The larger the target, the longer a pass that drafts save.
- **Text.** Code and answers that repeat their prompt are drafted well, other languages and high
  temperatures badly.
- **Drafter.** Gains grow with its training data ([own model](own-model.md#when-drafts-are-bad)).

## The runs

{described}
## Measure yours

```bash
moaspec eval --methods plain,moa                    # your machine, the prompts of the package
moaspec eval --model MODEL --drafter DRAFTER --methods plain,moa --suite prompts.jsonl --batch 4
```

In a checkout, on a machine that does nothing else, this adds a run to the page:

```bash
make gains-run NAME=my-machine GAINS="--threads 2"
make gains-run NAME=my-model GAINS="--model MODEL --drafter DRAFTER --suite spec-bench --limit 4"
make gains
```
"""


def _description(run: Mapping[str, Any]) -> str:
    loads = run["loads"]
    spread = ", ".join(
        f"{min(load['gain_by_repeat']):.2f}x to {max(load['gain_by_repeat']):.2f}x"
        for load in loads
        if load["lossless"] and load["gain_by_repeat"]
    )
    changed = " with changes" if run["changed"] else ""
    return (
        f"- `{run['model']}`, drafter `{run['drafter']}`, {machine(run)}: "
        f"{loads[0]['prompts']} prompts of {run['suite']}, up to {run['max_new_tokens']} tokens, "
        f"repeated {run['repeats']} times. Gain of single repeats, by row: {spread}. "
        f"Load average of the machine before: {run['load']}. "
        f"Commit {run['commit']}{changed}, {run['date']}, moaspec {run['versions']['moaspec']}, "
        f"PyTorch {run['versions']['torch']}."
    )


def _moaspec(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "moaspec", *arguments], check=False)
    if done.returncode not in (0, 1):  # 1: a method is lossy, which the page shows
        sys.exit(done.returncode)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
