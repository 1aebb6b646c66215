"""Prometheus metrics and OpenTelemetry traces of a server; they never contain text."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Telemetry:
    """Metrics and traces. Spans go to the tracer provider of the process, if it has one.

    Attributes:
        registry: of `prometheus_client`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tracer = trace.get_tracer("moaspec_edge")
        self._frames = self._counter("frames", "Messages", "direction")
        self._bytes = self._counter("bytes", "Bytes of messages", "direction")
        self._refused = self._counter("refused", "Connections that were refused", "reason")
        self._failed = self._counter("failed", "Sessions whose pass failed", "error")
        self._tokens = self._counter("tokens", "Tokens by what became of them", "kind")
        self._work = Histogram(
            "moaspec_work_seconds",
            "From a request to its answer",
            ["kind"],
            registry=self.registry,
            buckets=SECONDS,
        )

    def _counter(self, name: str, what: str, label: str) -> Counter:
        return Counter(f"moaspec_{name}", what, [label], registry=self.registry)

    def gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"moaspec_{name}", what, registry=self.registry)

    def by_owner(self, name: str, what: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Register a gauge with one value for each owner that `read` returns when it is asked."""

        class ByOwner(Collector):
            def collect(self) -> Iterator[GaugeMetricFamily]:
                family = GaugeMetricFamily(f"moaspec_owner_{name}", what, labels=["owner"])
                for owner, value in read().items():
                    family.add_metric([owner], value)
                yield family

        self.registry.register(ByOwner())

    def sent(self, size: int) -> None:
        self._frames.labels("out").inc()
        self._bytes.labels("out").inc(size)

    def received(self, size: int) -> None:
        self._frames.labels("in").inc()
        self._bytes.labels("in").inc(size)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def failed(self, error: str) -> None:
        self._failed.labels(error).inc()

    def verified(self, drafted: int, dropped: int, emitted: int) -> None:
        """Count the tokens of a round: drafts that were verified and were not, and its text."""
        self._tokens.labels("drafted").inc(drafted)
        self._tokens.labels("dropped").inc(dropped)
        self._tokens.labels("emitted").inc(emitted)

    @contextmanager
    def work(self, kind: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._tracer.start_as_current_span(kind):
            yield
        self._work.labels(kind).observe(time.perf_counter() - started)
