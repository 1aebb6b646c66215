"""Metrics for Prometheus. They contain no user's text, and clients choose no labels."""

import dataclasses
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moaspec_core.engine.scheduler import STEP_S
from moaspec_serve.openai.token_counts import TokenCounts
from moaspec_serve.sources.source import TextSource

_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """Metrics of one application and its source."""

    def __init__(self, source: TextSource) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(source))
        self.registry.register(_Steps(source))
        self._requests = Counter(
            "moaspec_requests", "Texts asked for.", ["endpoint", "outcome"], registry=self.registry
        )
        self._tokens = Counter(
            "moaspec_tokens", "Tokens, by who proposed them.", ["source"], registry=self.registry
        )
        self._prompt = Counter(
            "moaspec_prompt_tokens", "Tokens of prompts.", ["cached"], registry=self.registry
        )
        self._rounds = Counter("moaspec_rounds", "Verifications.", registry=self.registry)
        self._drafted = Counter("moaspec_drafted_tokens", "Drafts.", registry=self.registry)
        self._vllm = _VllmCounters(source.info.name, self.registry)
        self._first = self._histogram("moaspec_first_token_seconds", "Until the first token.")
        self._total = self._histogram("moaspec_text_seconds", "Until the last token.")

    def count(self, endpoint: str, outcome: str, prompt_tokens: int, counts: TokenCounts) -> None:
        """Count a text whose outcome is "done", "cancelled" or "failed"."""
        self._requests.labels(endpoint, outcome).inc()
        self._prompt.labels("yes").inc(counts.reused)
        self._prompt.labels("no").inc(max(prompt_tokens - counts.reused, 0))
        own = counts.tokens - counts.accepted - counts.copied
        for source, number in (
            ("draft", counts.accepted),
            ("copy", counts.copied),
            ("target", own),
        ):
            self._tokens.labels(source).inc(number)
        self._rounds.inc(counts.rounds)
        self._drafted.inc(counts.drafted)
        self._vllm.count(prompt_tokens, counts)
        if counts.first_s is not None:
            self._first.observe(counts.first_s - counts.started_s)
            self._total.observe(time.perf_counter() - counts.started_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(name, description, buckets=_SECONDS, registry=self.registry)


class _VllmCounters:
    """Counters under vLLM's names, for dashboards and tools that read these."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        def counter(name: str, description: str) -> Counter:
            made = Counter(f"vllm:{name}", description, ["model_name"], registry=registry)
            return made.labels(model)

        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens of texts.")
        self._rounds = counter("spec_decode_num_drafts", "Verifications with drafts.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Drafts of any proposer.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Accepted ones among them.")

    def count(self, prompt_tokens: int, counts: TokenCounts) -> None:
        self._prompt.inc(prompt_tokens)
        self._generated.inc(counts.tokens)
        self._rounds.inc(counts.drafting_rounds)
        self._drafted.inc(counts.proposed)
        self._accepted.inc(counts.accepted_drafts)


class _Gauges(Collector):
    """Gauges that are read when Prometheus collects them."""

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def collect(self) -> list[GaugeMetricFamily]:
        load, link = self._source.load, self._source.link
        gauges: dict[str, float] = {
            "moaspec_active_texts": load.active,
            "moaspec_waiting_texts": load.waiting,
        }
        if link is not None:
            gauges["moaspec_link_up"] = int(link.state == "up")
            gauges["moaspec_link_bytes_sent"] = link.bytes_sent
            gauges["moaspec_link_bytes_received"] = link.bytes_received
        learning = self._source.learning
        if learning is not None:
            for name, value in dataclasses.asdict(learning).items():
                gauges[f"moaspec_learning_{name}"] = float(value)
        own = [GaugeMetricFamily(name, name, value=value) for name, value in gauges.items()]
        return [*own, *self._vllm(load.active, load.waiting)]

    def _vllm(self, active: int, waiting: int) -> Iterator[GaugeMetricFamily]:
        """The same under vLLM's names."""
        for name, value in (("running", active), ("waiting", waiting)):
            made = GaugeMetricFamily(
                f"vllm:num_requests_{name}", f"Texts that are {name}.", labels=["model_name"]
            )
            made.add_metric([self._source.info.name], value)
            yield made


class _Steps(Collector):
    """What the scheduler did. Owners are named by hashes of their keys."""

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        counts = self._source.steps
        if counts is None:
            return
        for name, what, total in (
            ("steps", "Steps of the engine.", counts.steps),
            ("step_seconds", "Seconds of all steps.", counts.seconds),
            ("long_steps", f"Steps of more than {STEP_S:g} s.", counts.long_steps),
            ("rows_set_back", "Texts whose keys were dropped for room.", counts.rows_set_back),
        ):
            yield CounterMetricFamily(f"moaspec_{name}", what, value=total)
        for kind, name, what, read in (
            (GaugeMetricFamily, "active_texts", "Texts in decoding.", lambda work: work.active),
            (GaugeMetricFamily, "waiting_texts", "Texts that wait.", lambda work: work.waiting),
            (CounterMetricFamily, "read_tokens", "Tokens read.", lambda work: work.read_tokens),
            (CounterMetricFamily, "written_tokens", "Tokens written.", lambda w: w.written_tokens),
            (GaugeMetricFamily, "cache_bytes", "Keys and values.", lambda work: work.cache_bytes),
        ):
            family = kind(f"moaspec_owner_{name}", what, labels=["owner"])
            for owner, work in sorted(counts.owners.items()):
                family.add_metric([owner], read(work))
            yield family
