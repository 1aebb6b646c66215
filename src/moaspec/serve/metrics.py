"""Numbers for Prometheus. No user's text, and no label that a client can choose."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from moaspec.serve.openai.counts import TokenCounts
from moaspec.serve.sources.source import TextSource

_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """Counts of one app.

    Args:
        source: whose load and link are shown.
    """

    def __init__(self, source: TextSource) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Now(source))
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
        self._first = self._histogram("moaspec_first_token_seconds", "Until the first token.")
        self._total = self._histogram("moaspec_text_seconds", "Until the last token.")

    def count(self, endpoint: str, outcome: str, prompt_tokens: int, tally: TokenCounts) -> None:
        """Count a text that ended: "done", "cancelled" or "failed"."""
        self._requests.labels(endpoint, outcome).inc()
        self._prompt.labels("yes").inc(tally.reused)
        self._prompt.labels("no").inc(max(prompt_tokens - tally.reused, 0))
        own = tally.tokens - tally.accepted - tally.copied
        for source, number in (("draft", tally.accepted), ("copy", tally.copied), ("target", own)):
            self._tokens.labels(source).inc(number)
        self._rounds.inc(tally.rounds)
        self._drafted.inc(tally.drafted)
        if tally.first_s is not None:
            self._first.observe(tally.first_s - tally.started_s)
            self._total.observe(time.perf_counter() - tally.started_s)

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(name, what, buckets=_SECONDS, registry=self.registry)


class _Now(Collector):
    """What is true at the moment of asking."""

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def collect(self) -> list[GaugeMetricFamily]:
        load, link = self._source.load, self._source.link
        gauges = {"moaspec_active_texts": load.active, "moaspec_waiting_texts": load.waiting}
        if link is not None:
            gauges["moaspec_link_up"] = int(link.state == "up")
            gauges["moaspec_link_bytes_sent"] = link.bytes_sent
            gauges["moaspec_link_bytes_received"] = link.bytes_received
        return [GaugeMetricFamily(name, name, value=value) for name, value in gauges.items()]
