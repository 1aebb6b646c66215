"""Fuzzes the HTTP endpoints by their own OpenAPI document: no 500, no hang.

Serves a tiny random model and lets schemathesis (which is not one of our dependencies: it brings
many) make requests from the document, good and bad ones. The last line is JSON.

    pip install schemathesis
    python benchmarks/fuzz_http.py --max-examples 50
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import serving
import tiny
from moaspec.decode import Chain, Shaping
from moaspec.serve.desk import ServeSettings
from moaspec.serve.local import LocalSource

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
"""And, with --all, everything that schemathesis knows."""


def main() -> None:
    """Serve, fuzz, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", default=shutil.which("schemathesis") or "schemathesis")
    parser.add_argument("--max-examples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="of one request, in seconds")
    parser.add_argument("--all", action="store_true", help="all checks of schemathesis")
    arguments = parser.parse_args()
    # A short context, so that a request for a million tokens ends soon.
    target = tiny.fresh_target(
        tokenizer=serving.tokenizer(),
        vocab_size=serving.VOCAB,
        max_position_embeddings=160,
        eos_token_id=serving.END,
    )
    source = LocalSource(
        target, tiny.random_drafter(target), name="tiny", shaping=Shaping(Chain(2))
    )
    settings = ServeSettings(names=("*",), default_max_tokens=8)
    with serving.serving(source, settings) as served:
        command = [
            arguments.command,
            "run",
            f"{served.url}/openapi.json",
            f"--checks={'all' if arguments.all else CHECKS}",
            f"--max-examples={arguments.max_examples}",
            f"--seed={arguments.seed}",
            f"--request-timeout={arguments.timeout}",
            "--workers=1",
            "--no-color",
        ]
        done = subprocess.run(command, check=False)  # noqa: S603 - the user's own command
        with served.http() as http:
            alive = http.get("/health").status_code == 200
        left = source.load
    facts = {"schemathesis": done.returncode, "alive": alive, "active": left.active}
    print(json.dumps(facts))
    sys.exit(done.returncode or not alive)


if __name__ == "__main__":
    main()
