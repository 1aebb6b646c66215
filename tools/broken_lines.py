"""Break lines of the decoding core, one after another, and tell which test notices.

    python tools/broken_lines.py                  all of them
    python tools/broken_lines.py --near           the nearest tests only, some minutes
    python tools/broken_lines.py "tree mask"      those whose part begins so

For each line the nearest tests run first, then those of its distribution, then the repository's:
the tests of `make test`, then the others, which only `make test-all` runs. The first failure ends
the search, and must pass with the line as it was. A line that nobody notices lacks a test.

Files are restored, also by Ctrl-C. If the tool is killed, `git checkout` restores the file; so it
refuses to begin while one of its files has changes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
FAST = "essential or (not slow and not browser)"
SELECTIONS = {"make test": FAST, "make test-all": f"not ({FAST})"}
NO_TESTS = 5  # pytest's exit code

CORE = "packages/moaspec-core/src/moaspec_core/"
MAIN = "packages/moaspec/src/moaspec/"
EDGE = "packages/moaspec-edge/src/moaspec_edge/"
CORE_TESTS = "packages/moaspec-core/tests/"
MAIN_TESTS = "packages/moaspec/tests/"
EDGE_TESTS = "packages/moaspec-edge/tests/remote/"


@dataclass(frozen=True)
class BrokenLine:
    """A line, what it is replaced with, and the tests that should notice first."""

    part: str
    effect: str  # of the replacement
    file: str
    old: str  # occurs once in the file
    new: str
    near: tuple[str, ...]

    @property
    def scopes(self) -> Iterator[tuple[str, ...]]:
        """Paths of tests, the nearest first."""
        yield self.near
        yield (str(Path(*Path(self.file).parts[:2], "tests")),)
        yield ("tests", "packages")


BROKEN_LINES = (
    BrokenLine(
        "cache: commit",
        "moves the keys of accepted drafts, and not their values",
        MAIN + "drafting/kv_cache.py",
        "data_L2HSD[:, :, :, to] = data_L2HSD[:, :, :, slot]",
        "data_L2HSD[:, 0, :, to] = data_L2HSD[:, 0, :, slot]",
        (MAIN_TESTS + "drafting/test_kv_cache.py", MAIN_TESTS + "engine"),
    ),
    BrokenLine(
        "tree mask",
        "in rows of different lengths, hides the last slot of a tree",
        MAIN + "drafting/kv_cache.py",
        "(offset_BS < own)",
        "(offset_BS < own - 1)",
        (MAIN_TESTS + "drafting/test_kv_cache.py", MAIN_TESTS + "engine"),
    ),
    BrokenLine(
        "positions",
        "counts nodes instead of depths, which is right for chains only",
        MAIN + "engine/local_verifier.py",
        "*(last + depth for depth in depths)",
        "*(last + 1 + node for node, _ in enumerate(depths))",
        (MAIN_TESTS + "engine",),
    ),
    BrokenLine(
        "accept, greedy",
        "takes the bonus token behind as many nodes as were accepted, right for chains only",
        MAIN + "engine/accept.py",
        "VerifyResult(tuple(path), chosen[last + 1])",
        "VerifyResult(tuple(path), chosen[len(path)])",
        (MAIN_TESTS + "engine",),
    ),
    BrokenLine(
        "accept, sampled",
        "reads the logits behind as many nodes as were accepted, right for chains only",
        MAIN + "engine/accept.py",
        "return self.first + 1 + self.node",
        "return self.first + len(self.path)",
        (MAIN_TESTS + "engine",),
    ),
    BrokenLine(
        "noise",
        "drops the upper 32 bits of a seed",
        CORE + "sampling/philox.py",
        "key = (seed & _MASK, (seed >> 32) & _MASK)",
        "key = (seed & _MASK, 0 * seed)",
        (CORE_TESTS + "sampling", MAIN_TESTS + "backends/cpu/test_fused_noise.py"),
    ),
    BrokenLine(
        "encoder input",
        "counts positions from the first new token, so only drafts become worse",
        MAIN + "engine/local_verifier.py",
        "positions = [position for tokens in ranges.values() for position in tokens]",
        "positions = [position - tokens[0] for tokens in ranges.values() for position in tokens]",
        (MAIN_TESTS + "engine", MAIN_TESTS + "drafting"),
    ),
    BrokenLine(
        "reused layers",
        "overwrites the target's own keys with those of drafts",
        MAIN + "drafting/moa_proposer.py",
        "min(max(start, num_encoded), stop)",
        "min(start + 0 * num_encoded, stop)",
        (MAIN_TESTS + "drafting", MAIN_TESTS + "engine/test_lossless.py"),
    ),
    BrokenLine(
        "stop strings",
        "keeps too little text for the longest of several stop strings",
        CORE + "sampling/stop_strings.py",
        "self._keep = max(map(len, strings)) - 1",
        "self._keep = min(map(len, strings)) - 1",
        (CORE_TESTS + "sampling/test_stop_strings.py",),
    ),
    BrokenLine(
        "prefix reuse",
        "takes the newest token of the old text for verified, whose keys are not there yet",
        CORE + "engine/engine.py",
        "request.num_verified = min(common, old.num_verified)",
        "request.num_verified = common",
        (MAIN_TESTS + "engine/test_engine.py", MAIN_TESTS + "generation/test_session.py"),
    ),
    BrokenLine(
        "policy",
        "lets a request lose any time to drafts",
        CORE + "policy/policies.py",
        "MAX_LOSS * self.plain_s) - self.lost_s",
        "MAX_LOSS * self.plain_s) - 0 * self.lost_s",
        (MAIN_TESTS + "drafting/policy",),
    ),
    BrokenLine(
        "costs",
        "prices each draft alone instead of all drafts up to it",
        CORE + "policy/cost_model.py",
        "(verify_s[1:] - verify_s[0])",
        "(verify_s[1:] - verify_s[:-1])",
        (MAIN_TESTS + "drafting/policy",),
    ),
    BrokenLine(
        "batch rows",
        "reads the states of the row before where that one was split",
        MAIN + "engine/local_verifier.py",
        "first += len(parts)",
        "first += 1",
        (MAIN_TESTS + "engine",),
    ),
    BrokenLine(
        "logprobs",
        "reports those of the token before each accepted draft",
        MAIN + "engine/accept.py",
        "indices = [self.first, *(self.first + 1 + node for node in self.path)]",
        "indices = [self.first, *(self.first + node for node in self.path)]",
        (CORE_TESTS + "sampling/test_choose.py", MAIN_TESTS + "engine"),
    ),
    BrokenLine(
        "chunked prompts",
        "overlaps two chunks of a long prompt by a token",
        MAIN + "engine/local_verifier.py",
        "start += len(chunk)",
        "start += len(chunk) - 1",
        (MAIN_TESTS + "engine/test_local_verifier.py", MAIN_TESTS + "engine"),
    ),
    BrokenLine(
        "wire",
        "swaps two numbers, at both ends of the same version",
        EDGE + "protocol/wire.py",
        'SOURCES: tuple[Source, ...] = ("target", "draft", "copy")',
        'SOURCES: tuple[Source, ...] = ("draft", "target", "copy")',
        (EDGE_TESTS + "protocol",),
    ),
    BrokenLine(
        "outage",
        "keeps a device's note of what it received before the cut, instead of the device's own",
        EDGE + "server/server_session.py",
        "self.records.sent = PositionSet(runs)",
        "self.records.sent = self.records.sent or PositionSet(runs)",
        (EDGE_TESTS + "server/test_resumed_activations.py", EDGE_TESTS + "test_cut.py"),
    ),
    BrokenLine(
        "outage, drafts",
        "repeats the drafts of before a cut, though longer ones were made since",
        EDGE + "device/remote_verifier.py",
        "            pending.resent = True\n            self._keep_provisional(pending)",
        "            self._keep_provisional(pending)",
        (EDGE_TESTS + "device/test_remote_verifier.py", EDGE_TESTS + "test_cut.py"),
    ),
    BrokenLine(
        "GGUF tensors",
        "takes the rows of rotated pairs in another order",
        MAIN + "target/weights/gguf_tensors.py",
        "order.reshape(self.heads, -1, 2)",
        "order.reshape(self.heads, 2, -1)",
        (MAIN_TESTS + "target/weights/test_gguf_models.py",),
    ),
    BrokenLine(
        "GGUF tokenizer",
        "merges the rightmost of equal scores first",
        MAIN + "target/weights/gguf_merges.py",
        "heappush(queue, (-score, left, right, token))",
        "heappush(queue, (-score, -left, right, token))",
        (MAIN_TESTS + "target/weights/test_gguf_tokenizer.py",),
    ),
    BrokenLine(
        "int8",
        "gives a trimmed vocabulary the scales of the first rows, so only drafts become worse",
        MAIN + "target/weights/int8_rows.py",
        "self.scale_R[rows]",
        "self.scale_R[: len(rows)]",
        (EDGE_TESTS + "device/test_bundle.py",),
    ),
    BrokenLine(
        "LoRA",
        "merges an adapter although some of its tensors have no place in the model",
        MAIN + "target/weights/adapter.py",
        "None if missing or unused else",
        "None if missing else",
        (MAIN_TESTS + "target/weights/test_adapter.py",),
    ),
    BrokenLine(
        "order of filters",
        "takes top-p of all tokens instead of those that top-k has left",
        MAIN + "sampling/processors.py",
        "_top_p_threshold(remaining_NV, settings)",
        "_top_p_threshold(scaled_NV, settings)",
        (CORE_TESTS + "sampling",),
    ),
    BrokenLine(
        "scheduler's order",
        "lets owners that are ahead take part in each step",
        CORE + "engine/scheduler.py",
        "if self.served_of(owner) <= least + ahead_s",
        "if self.served_of(owner) >= least",
        (CORE_TESTS + "engine/test_scheduler.py",),
    ),
    BrokenLine(
        "scheduler's charge",
        "charges prompts as if a token after others cost nothing",
        CORE + "engine/scheduler.py",
        "part = costs.fixed_s / len(tokens) + rest_s * own / total",
        "part = costs.fixed_s / len(tokens)",
        (CORE_TESTS + "engine/test_scheduler.py",),
    ),
    BrokenLine(
        "scheduler's returns",
        "lets an owner that was away take the turns that it missed",
        CORE + "engine/scheduler.py",
        "self.served[owner] = max(self.served.get(owner, 0.0), least)",
        "self.served[owner] = self.served.get(owner, 0.0)",
        (CORE_TESTS + "engine/test_scheduler.py",),
    ),
    BrokenLine(
        "room's turns",
        "keeps room for those that were served more",
        CORE + "engine/cache_room.py",
        "return ahead_s > number * length_s",
        "return ahead_s < number * length_s",
        (CORE_TESTS + "engine/test_cache_room.py",),
    ),
    BrokenLine(
        "room's progress",
        "takes room from texts before they write anything, for ever",
        CORE + "engine/cache_room.py",
        "return self.reads and self.lost >= MAX_LOST",
        "return False",
        (CORE_TESTS + "engine/test_cache_room.py",),
    ),
)


def main() -> None:
    """Break the lines that are named, or all."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("parts", nargs="*", metavar="PART", help="How a part's name begins.")
    options.add_argument("--near", action="store_true", help="Run the nearest tests only.")
    args = options.parse_args()
    chosen = [
        line
        for line in BROKEN_LINES
        if not args.parts or any(line.part.startswith(part) for part in args.parts)
    ]
    _require_unchanged(chosen)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("| File | Broken | Noticed by | In |\n|---|---|---|---|", flush=True)
    noticed = [_try_line(line, near=args.near) for line in chosen]
    fast = noticed.count("make test")
    print(f"\nmake test notices {fast} of {len(chosen)}, make test-all {len(chosen)}", end="")
    print(f" but {missed}." if (missed := noticed.count("")) else ".")
    sys.exit(1 if missed else 0)


def _require_unchanged(lines: list[BrokenLine]) -> None:
    """End if a file has changes, or does not have its line once."""
    files = sorted({line.file for line in lines})
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *files], cwd=ROOT).returncode:
        sys.exit(f"Commit or restore these files first: {' '.join(files)}")
    for line in lines:
        if (ROOT / line.file).read_text().count(line.old) != 1:
            sys.exit(f"{line.file} does not have once: {line.old}")


def _try_line(line: BrokenLine, *, near: bool) -> str:
    """Print a row of the table; the command that notices, or nothing."""
    started = time.monotonic()
    test, command = "", ""
    with _broken(line):
        for name, marks in SELECTIONS.items():
            for paths in [line.near] if near else line.scopes:
                test = _first_failure(paths, marks)
                if test:
                    command = name
                    break
            if test:
                break
    if test and _first_failure((test,)):
        sys.exit(f"{test} fails without a broken line, too.")
    file, took_s = line.file.partition("/src/")[2], time.monotonic() - started
    said = f"`{test.rpartition('/')[2]}`" if test else "nobody"
    print(f"| `{file}` | {line.part}: {line.effect} | {said} | {command} |", flush=True)
    print(f"{line.part}: {took_s:.0f} s", file=sys.stderr)
    return command


@contextmanager
def _broken(line: BrokenLine) -> Iterator[None]:
    path = ROOT / line.file
    whole = path.read_bytes()
    try:
        path.write_text(whole.decode().replace(line.old, line.new))
        yield
    finally:
        path.write_bytes(whole)


def _first_failure(paths: tuple[str, ...], marks: str = "") -> str:
    """The first test that fails, or the file that cannot be imported; nothing if all pass."""
    words = [*PYTEST, *(("-m", marks) if marks else ()), *paths]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode in (0, NO_TESTS):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", done.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}failed: {done.returncode}")
    return found[1]


if __name__ == "__main__":
    main()
