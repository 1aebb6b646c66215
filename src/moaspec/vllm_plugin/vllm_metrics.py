"""What the plugin counts beside vLLM's own metrics.

A worker is a process of its own, so these appear under vLLM's `/metrics` where
`PROMETHEUS_MULTIPROC_DIR` names an empty directory before vLLM starts.
"""

from __future__ import annotations

from prometheus_client import Counter

FAILURES = Counter(
    "moaspec:drafter_failures",
    "Steps of vLLM in which the drafter failed; their requests went on without drafts.",
)
SECONDS = Counter(
    "moaspec:drafter_seconds",
    "Host seconds that the drafter took, by part: encode (once per verified token) and draft.",
    ["part"],
)
SECONDS_OF = {part: SECONDS.labels(part) for part in ("encode", "draft")}
