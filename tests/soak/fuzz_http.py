"""Fuzzes the HTTP endpoints by their own OpenAPI document: no 500, no hang.

Serves a tiny random model, as `moaspec serve` does or with --edge as `moaspec edge` does, and lets
schemathesis (which is not one of our dependencies: it brings many) make requests from the document,
good and bad ones. The last line is JSON; exit code 1 says that a check failed, a request took
longer than --timeout, the server died, or a text was still being decoded when all was over.

    pip install schemathesis
    python tests/soak/fuzz_http.py --max-examples 50
    python tests/soak/fuzz_http.py --max-examples 50 --edge
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import serving
import tiny
from edges import Edge
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.policies import DraftSettings
from moaspec_serve.server_context import ServeSettings
from moaspec_serve.sources.local_source import LocalSource
from moaspec_serve.sources.source import TextSource

NOT_CHECKED = "positive_data_acceptance"
"""Of all that schemathesis knows. A document cannot say all that is refused: an empty prompt, the
name of a tool that is not there, a JSON schema that means nothing."""

CONTEXT = 160
"""A short one, so that a request for a million tokens ends soon."""


def main() -> None:
    """Serve, fuzz, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", default=shutil.which("schemathesis") or "schemathesis")
    parser.add_argument("--max-examples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="of one request, in seconds")
    parser.add_argument("--edge", action="store_true", help="fuzz the edge's endpoints")
    arguments = parser.parse_args()
    source = make_source(edge=arguments.edge)
    settings = ServeSettings(names=("*",), default_max_tokens=8)
    with serving.serving(source, settings) as served:
        command = [
            arguments.command,
            "run",
            f"{served.url}/openapi.json",
            "--checks=all",
            f"--exclude-checks={NOT_CHECKED}",
            f"--max-examples={arguments.max_examples}",
            f"--seed={arguments.seed}",
            f"--request-timeout={arguments.timeout}",
            "--workers=1",  # Python 3.11 cannot parse deep source in two threads at a time
            "--no-color",
        ]
        done = subprocess.run(command, check=False)
        with served.http() as http:
            alive = http.get("/health").status_code == 200
        left = source.load
    data = {"schemathesis": done.returncode, "alive": alive}
    print(json.dumps(data | {"active": left.active, "waiting": left.waiting}))
    sys.exit(bool(done.returncode or not alive or left.active or left.waiting))


def make_source(*, edge: bool) -> TextSource:
    """A tiny random model behind the endpoints."""
    target = tiny.fresh_target(
        tokenizer=serving.tokenizer(),
        vocab_size=serving.VOCAB,
        max_position_embeddings=CONTEXT,
        eos_token_id=serving.END,
    )
    if edge:
        return Edge(target).source
    drafter = tiny.random_drafter(target)
    return LocalSource(target, drafter, name=serving.MODEL, shaping=DraftSettings(Chain(2)))


if __name__ == "__main__":
    main()
