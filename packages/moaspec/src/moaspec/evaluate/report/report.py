"""Reports of `measure`: outcomes by method, and their summary as JSON."""

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch

import moaspec
from moaspec.calibration.measure_costs import machine as processor_name
from moaspec.evaluate.correctness.equality import RULE, Equality
from moaspec.evaluate.methods import Method, MethodRun
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.results_store import PromptTurn, Sample
from moaspec_core.engine.request_state import GenerationResult, acceptance_by_depth

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


@dataclass
class Outcome:
    """All samples of one method, in the order of the prompts."""

    method: Method
    samples: list[Sample] = field(default_factory=list)
    timed: bool = True  # whether its seconds are valid

    @property
    def runs(self) -> list[MethodRun]:
        return [run for sample in self.samples for run in sample.runs]

    @property
    def equality(self) -> list[Equality]:
        return [sample.equality for sample in self.samples]

    @property
    def results(self) -> list[GenerationResult]:
        """Results of the first repeat; other repeats differ in speed only."""
        return [sample.runs[0].result for sample in self.samples]

    @property
    def num_tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results)

    @property
    def tokens_per_s(self) -> float | None:
        """Total tokens over total seconds, with the median repeat of each prompt."""
        return self._speed(seconds)

    @property
    def tokens_per_s_by_repeat(self) -> list[float]:
        if not self.timed or not self.samples:
            return []
        repeats = range(len(self.samples[0].runs))
        return [self._speed(lambda sample, i=i: sample.runs[i].seconds) or 0.0 for i in repeats]

    def _speed(self, of: Callable[..., float]) -> float | None:
        total = sum(of(sample) for sample in self.samples)
        return self.num_tokens / total if self.timed and total > 0 else None

    @property
    def tau(self) -> float | None:
        """Tokens per round over all prompts; None without rounds."""
        rounds = sum(result.num_rounds for result in self.results)
        emitted = sum(sum(result.accept_lengths) for result in self.results)
        return emitted / rounds if rounds else None

    @property
    def passes_per_token(self) -> float | None:
        """Target passes per generated token; encoding a prompt counts as one pass."""
        passes = sum(result.num_rounds + 1 for result in self.results)
        return passes / self.num_tokens if self.num_tokens else None

    @property
    def lossless(self) -> bool:
        return all(item.lossless for item in self.equality)


@dataclass
class Report:
    """Outcomes of a run."""

    outcomes: list[Outcome]
    baseline: str  # name of the method that speed-ups refer to
    batch: int = 1  # prompts decoded together by timed methods
    # Turns that do not fit into the target's context.
    skipped: list[PromptTurn] = field(default_factory=list)
    choice: str = "greedy"  # kind of sampling, as text
    interrupted: bool = False  # whether some prompts were not measured

    @property
    def lossless(self) -> bool:
        return all(outcome.lossless for outcome in self.outcomes)

    def speedup(self, outcome: Outcome) -> float | None:
        """Median speed ratio to the baseline over prompts; None if either method is lossy."""
        return _median_speedup(outcome, self.reference)

    @property
    def reference(self) -> Outcome:
        """The outcome of the baseline."""
        (found,) = (each for each in self.outcomes if each.method.name == self.baseline)
        return found

    def as_json(self) -> dict[str, Any]:
        target = self.outcomes[0].method.target
        return {
            "target": target.name,
            "dtype": target.precision,
            "device": str(target.device),
            **surroundings(),
            "rule": RULE,
            "baseline": self.baseline,
            "batch": self.batch,
            "choice": self.choice,
            "speed_is": "throughput" if self.batch > 1 else "one prompt at a time",
            "skipped": [item.key[:3] for item in self.skipped],
            "methods": {each.method.name: self._method_json(each) for each in self.outcomes},
        }

    def _method_json(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "key": outcome.method.key,
            "timed": outcome.timed,
            "lossless": outcome.lossless,
            "ties": sum(found.kind == "near_tie" for found in outcome.equality),
            "median_speedup": self.speedup(outcome),
            **_summary(outcome),
            "tokens_per_s_by_repeat": outcome.tokens_per_s_by_repeat,
            "acceptance_by_depth": acceptance_by_depth(outcome.results),
            "suites": self._parts_json(outcome, lambda prompt: prompt.suite),
            "categories": self._parts_json(
                outcome, lambda prompt: f"{prompt.suite}/{prompt.category}".rstrip("/")
            ),
            "prompts": [_sample_json(sample, outcome.timed) for sample in outcome.samples],
        }

    def _parts_json(
        self, outcome: Outcome, part_of: Callable[[Prompt], str]
    ) -> dict[str, dict[str, Any]]:
        """A summary per part; no speed-ups if method or baseline is lossy."""
        reference = self.reference
        lossless = reference.lossless and outcome.lossless
        parts: dict[str, tuple[Outcome, Outcome]] = {}
        for samples in zip(outcome.samples, reference.samples, strict=True):
            name = part_of(samples[0].item.prompt)
            if name not in parts:
                parts[name] = (replace(outcome, samples=[]), replace(reference, samples=[]))
            for part, sample in zip(parts[name], samples, strict=True):
                part.samples.append(sample)
        return {
            name: {
                "median_speedup": _median_speedup(part, base) if lossless else None,
                **_summary(part),
            }
            for name, (part, base) in parts.items()
        }


def _median_speedup(outcome: Outcome, base: Outcome) -> float | None:
    """Median over prompts; None if either method is lossy or not timed."""
    if not (outcome.lossless and base.lossless and outcome.timed and base.timed):
        return None
    pairs = zip(outcome.samples, base.samples, strict=True)
    return statistics.median(speed(a) / speed(b) for a, b in pairs)


def seconds(sample: Sample) -> float:
    """Seconds of the median repeat."""
    return statistics.median(run.seconds for run in sample.runs)


def speed(sample: Sample) -> float:
    """Tokens per second of the median repeat."""
    return len(sample.runs[0].token_ids) / seconds(sample)


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "num_prompts": len(outcome.samples),
        "tokens": outcome.num_tokens,
        "tokens_per_s": outcome.tokens_per_s,
        "tau": outcome.tau,
        "passes_per_token": outcome.passes_per_token,
        **(costs(outcome) if outcome.timed else {}),
    }


def costs(outcome: Outcome) -> dict[str, Any]:
    """Times of the parts of a round, CPU time and peak memory of a timed method."""
    runs = outcome.runs
    timings = [run.result.timing for run in runs]
    rounds = sum(run.result.num_rounds for run in runs)
    parts = {
        part: sum(getattr(timing, f"{part}_s") for timing in timings)
        for part in ("draft", "verify", "encode")
    }
    known = rounds > 0 and any(parts.values())
    decoding = sum(timing.total_s - timing.prefill_s for timing in timings)
    parts["rest"] = max(0.0, decoding - sum(parts.values()))
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    tokens = sum(len(run.token_ids) for run in runs)
    return {
        "first_token_s": statistics.median(timing.prefill_s for timing in timings),
        "cpu_s_per_token": sum(run.cpu_s for run in runs) / max(1, tokens),
        "peak_bytes": max(peaks, default=None),
        "round_s": {name: part / rounds for name, part in parts.items()} if known else None,
    }


def _sample_json(sample: Sample, timed: bool) -> dict[str, Any]:
    first = sample.runs[0]
    return {
        "suite": sample.item.prompt.suite,
        "category": sample.item.prompt.category,
        "question_id": sample.item.prompt.question_id,
        "turn": sample.item.turn,
        "prompt_tokens": len(sample.item.prompt_ids),
        "tokens": len(first.token_ids),
        "seconds": [run.seconds for run in sample.runs] if timed else None,
        "rounds": first.result.num_rounds,
        "emitted": sum(first.result.accept_lengths),
        "tau": first.result.tau,
        "equality": vars(sample.equality),
    }


def surroundings() -> dict[str, Any]:
    """Threads, machine and versions of the measurement."""
    return {
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": {"moaspec": moaspec.__version__} | {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """Processor, GPU and system of this machine."""
    return {
        "processor": processor_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }
