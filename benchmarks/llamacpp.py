"""Own engine and `moaspec serve` beside llama.cpp's server, with 1 to 64 streams at once.

All read one GGUF file and use as many threads. They take turns, several times over: each answers
the same prompts, all at once, plainly, and ours also with drafts. Tokens are counted from the first
request to the last token, prompts included. A gap is the time between two pieces of a text that
reach its reader; drafts that are accepted together are one piece, so p99 is no better than per
token. CPU seconds are those of the processes that decode: on a busy machine their ratios still
hold. Every text of the engine with drafts must be the target's own, or there are no figures.

llama.cpp comes with the binding `xllamacpp`, which only this needs: pip install xllamacpp. Other
servers with OpenAI's API can be named with --other. Servers of this machine are stopped (SIGSTOP)
while others have their turn. vLLM's CPU build, for one, with the target's directory, as
`moaspec.target.registry.find_weights` names it:

    OMP_NUM_THREADS=2 scripts/with_vllm.sh vllm serve DIRECTORY --dtype bfloat16
        --max-model-len 2048 --max-num-seqs 64 --no-enable-prefix-caching
    python benchmarks/llamacpp.py --threads 2 --suite spec_bench.jsonl
        --other vLLM=http://localhost:8000
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
from common import load, parser, setting, spread, trusted

from moaspec import Target
from moaspec.evaluate.correctness.equality import judge
from moaspec.evaluate.prompt_suites import Prompt, read_prompts
from moaspec.generation.local_engine import local_engine
from moaspec.generation.shaping import shaping_for
from moaspec.model.moa import MoADrafter
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.tokens.names import ALIASES, local_gguf

STREAMS = (1, 4, 16, 64)
SERVERS = ("serve", "llama.cpp")
WAIT_S = 300.0
"""A server must answer within this time of its start."""


def gguf_of(alias: str) -> Path:
    """The quantised file inside an alias's package."""
    path = local_gguf(ALIASES[alias])
    if path is None:
        raise SystemExit(f"The package with {alias}'s GGUF is not installed; name a file instead.")
    return path


class LlamaCpp:
    """llama.cpp's server with a model, in a process of its own.

    In ours, OpenMP would count llama.cpp's idle threads with ours as more than the machine has
    cores, and let threads sleep at every barrier: our decoding would take a fifth longer.

    Args:
        gguf: its file.
        threads: CPU threads.
        context: tokens of each text.
        streams: texts at once.
        drafts: "" for none, one of its ways ("ngram_simple", "ngram_mod", ...), or the file of a
            smaller model.

    Attributes:
        version: of the binding.
        url: of the server.
    """

    def __init__(
        self,
        gguf: Path,
        *,
        threads: int,
        context: int = 2048,
        streams: int = 1,
        drafts: str = "",
    ) -> None:
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe()
        child = spawning.Process(
            target=_serve,
            args=(theirs, str(gguf), threads, (context, streams), drafts),
            daemon=True,
        )
        child.start()
        theirs.close()
        self._ours = ours
        self._child = child
        self.version, self.url = self._answer()

    def close(self) -> None:
        """End the process."""
        self._ours.close()
        self._child.join()

    def tokens_per_s(self, prompt_ids: Sequence[int], num_tokens: int) -> float:
        """Speed after the prompt's pass, by llama.cpp's own clock."""
        return self.timings(prompt_ids, num_tokens)["predicted_per_second"]

    def prompt_tokens_per_s(self, prompt_ids: Sequence[int]) -> float:
        """Speed of the prompt's pass, by llama.cpp's own clock."""
        return self.timings(prompt_ids, 1)["prompt_per_second"]

    def timings(
        self, prompt_ids: Sequence[int], num_tokens: int, *, stop: bool = False
    ) -> dict[str, float]:
        """What the server says of a request's times: `predicted_n`, `predicted_ms`, `prompt_ms` ...

        Args:
            stop: whether an end token ends the text.
        """
        body = {
            "prompt": list(prompt_ids),
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": not stop,
            "cache_prompt": False,
        }
        answer = httpx.post(f"{self.url}/completion", json=body, timeout=WAIT_S).json()
        return dict(answer["timings"])

    def _answer(self) -> Any:
        try:
            return self._ours.recv()
        except EOFError:
            raise SystemExit(
                "llama.cpp's process has ended, see above. Is its binding installed? "
                "pip install xllamacpp"
            ) from None


def _serve(parent: Connection, gguf: str, threads: int, room: tuple[int, int], drafts: str) -> None:
    """Tell the binding's version and the server's address, and serve as long as the parent runs."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.verbosity = gguf, 0, -1
    context, streams = room
    params.n_ctx, params.n_parallel = context * streams, streams
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if drafts:
        kind = "draft_simple" if drafts.endswith(".gguf") else drafts
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
        if kind == "draft_simple":
            draft = params.speculative.draft
            draft.mparams.path = drafts
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
    server: Any = xllamacpp.Server(params)
    parent.send((str(xllamacpp.__version__), server.listening_address))
    with contextlib.suppress(EOFError):
        parent.recv()


@dataclass
class Run:
    """What one way of decoding did with all prompts at once.

    Attributes:
        tokens: generated.
        seconds: from the first request to the last token.
        cpu_s: CPU time of the processes that decoded; NaN if unknown.
        gaps_s: times between two pieces of a text.
        first_s: times until the first piece.
        texts: token ids of each text, where known.
    """

    tokens: int
    seconds: float
    cpu_s: float
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def add(self, arrivals_s: Sequence[float], started_s: float) -> None:
        """Note when the pieces of one text arrived."""
        self.first_s.append(arrivals_s[0] - started_s if arrivals_s else np.nan)
        self.gaps_s += [later - one for one, later in itertools.pairwise(arrivals_s)]


Way = Callable[[Sequence[Prompt], str], Run]
"""Decodes prompts, all at once; the second argument is a name of the run."""


def engine_way(
    target: Target, drafter: MoADrafter | None, shaping: DraftSettings | None, most: int
) -> Way:
    """The engine alone, without HTTP."""
    layers = None if shaping is None else shaping.num_target_layers
    engine = local_engine(target, drafter, num_target_layers=layers)

    def decode(prompts: Sequence[Prompt], _: str) -> Run:
        started_s, cpu_s = time.perf_counter(), time.process_time()
        arrivals: dict[int, list[float]] = {}
        results = []
        for prompt in prompts:
            handle = engine.add(
                chat_ids(target, prompt.turns[0]),
                max_new_tokens=most,
                stop_token_ids=target.stop_token_ids,
                shape=None if shaping is None else shaping.policy(),
                free_branches=None if shaping is None else shaping.branches(),
            )
            arrivals[handle] = []
            results.append(engine.result(handle))
        while engine.num_active:
            for event in engine.step():
                arrivals[event.handle].append(time.perf_counter())
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        texts = [result.token_ids for result in results]
        run = Run(sum(map(len, texts)), seconds, cpu_s, texts=texts)
        for times in arrivals.values():
            run.add(times, started_s)
        return run

    return decode


def server_way(running: contextlib.ExitStack, url: str, most: int, **body: Any) -> Way:
    """A server with OpenAI's API, whose processes run for their turns only.

    Args:
        running: lets them run on when it is closed.
        url: of the server.
        most: tokens of an answer.
        body: further fields of a request.
    """
    body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body |= {"temperature": 0, "max_tokens": most, "stream": True}
    body["stream_options"] = {"include_usage": True}
    processes = _processes_of(url)
    for process in processes:
        running.callback(process.resume)

    def decode(prompts: Sequence[Prompt], name: str) -> Run:
        async def all_of() -> list[tuple[list[float], int]]:
            bodies = [
                body | {"messages": [{"role": "user", "content": prompt.turns[0]}]}
                for prompt in prompts
            ]
            return await asyncio.gather(*(_stream(url, one, name) for one in bodies))

        with _running(processes):
            started_s, cpu_s = time.perf_counter(), _cpu_s(processes)
            answers = asyncio.run(all_of())
            seconds, cpu_s = time.perf_counter() - started_s, _cpu_s(processes) - cpu_s
        run = Run(sum(tokens for _, tokens in answers), seconds, cpu_s)
        for times, _ in answers:
            run.add(times, started_s)
        return run

    return decode


def _processes_of(url: str) -> list[psutil.Process]:
    """The process of this machine that listens at an address, and its descendants."""
    at = urlsplit(url)
    for connection in psutil.net_connections("tcp"):
        listens = (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == at.port
        )
        if listens and connection.pid is not None and at.hostname in ("127.0.0.1", "localhost"):
            first = psutil.Process(connection.pid)
            return [first, *first.children(recursive=True)]
    return []


@contextlib.contextmanager
def _running(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Let stopped processes run for a while."""
    for process in processes:
        process.resume()
    try:
        yield
    finally:
        for process in processes:
            process.suspend()


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of processes; NaN if there are none."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times) if times else float("nan")


async def _stream(url: str, body: dict[str, Any], key: str) -> tuple[list[float], int]:
    """When the pieces of an answer arrived, and its number of tokens."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=2**20)
    content = json.dumps(body).encode()
    # With a key of its own, no run finds what another one has left in a server's cache.
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    arrivals: list[float] = []
    tokens = 0
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{url} answers {status!r}: {(await reader.read())[-500:]!r}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        found = json.loads(line[6:])
        if any(choice["delta"].get("content") for choice in found["choices"]):
            arrivals.append(time.perf_counter())
        if found.get("usage"):
            tokens = found["usage"]["completion_tokens"]
    writer.close()
    return arrivals, tokens


@contextlib.contextmanager
def served(args: Any, streams: int) -> Iterator[str]:
    """The address of a `moaspec serve`."""
    command = [sys.executable, "-m", "moaspec", "serve", "--port", str(args.port)]
    for name in ("model", "drafter", "dtype", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--max-active", str(streams), "--generation-config", "none"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:  # noqa: S603 - this Python
        try:
            url, until_s = f"http://127.0.0.1:{args.port}", time.monotonic() + WAIT_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"No answer of {' '.join(command)}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").is_success
    except httpx.TransportError:
        return False


def main() -> None:
    """Print one line per way and number of streams, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--suite", default="bundled")
    options.add_argument("--streams", type=int, nargs="+", default=[*STREAMS])
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--servers", nargs="*", choices=SERVERS, default=[*SERVERS])
    options.add_argument("--port", type=int, default=8765, help="Of moaspec serve.")
    options.add_argument("--other", nargs="*", default=[], help="NAME=URL of further servers.")
    args = options.parse_args()
    target, drafter = load(args)
    shaping = shaping_for(target, drafter)
    prompts, most = read_prompts(args.suite), args.max_new_tokens
    longest = most + max(len(chat_ids(target, prompt.turns[0])) for prompt in prompts)
    info = {"benchmark": "llamacpp", "setting": setting(target), "drafts": shaping.tree}
    info |= {"suite": Path(args.suite).name, "max_new_tokens": most}
    ways: dict[str, Way] = {
        "engine, plain": engine_way(target, None, None, most),
        "engine": engine_way(target, drafter, shaping, most),
    }
    with contextlib.ExitStack() as running:
        if "serve" in args.servers:
            url = running.enter_context(served(args, max(args.streams)))
            plain = {"moaspec": {"speculation": False}}
            ways["serve, plain"] = server_way(running, url, most, **plain)
            ways["serve"] = server_way(running, url, most)
        if "llama.cpp" in args.servers:
            gguf, streams = gguf_of(args.model), max(args.streams)
            llama = LlamaCpp(gguf, threads=args.threads, context=longest, streams=streams)
            info["llama_cpp"] = llama.version
            ways["llama.cpp"] = server_way(running, llama.url, most, cache_prompt=False)
        for one in args.other:
            name, _, address = one.partition("=")
            ways[name] = server_way(running, address, most)
        runs = compared(ways, prompts, args, lambda *texts: check(args, target, *texts))
    found = [figures(name, streams, of) for (streams, name), of in runs.items()]
    print(table(found))
    print(json.dumps(info | {"found": found}))


def compared(
    ways: dict[str, Way], prompts: Sequence[Prompt], args: Any, check: Callable[..., None]
) -> dict[tuple[int, str], list[Run]]:
    """The runs by number of streams and way; every round takes other prompts."""
    runs: defaultdict[tuple[int, str], list[Run]] = defaultdict(list)
    for name, way in ways.items():
        way(prompts[:1], f"warm-{name}")
    for number, streams in itertools.product(range(args.rounds), args.streams):
        chosen = [prompts[(number * streams + i) % len(prompts)] for i in range(streams)]
        for name, way in ways.items():
            run = way(chosen, f"{number}-{streams}-{name}".replace(" ", ""))
            runs[streams, name].append(run)
            print(
                f"{streams:3} streams, {name:14} {run.tokens / run.seconds:7.1f} tokens/s, "
                f"{run.tokens} tokens, {run.cpu_s:.1f} CPU seconds",
                file=sys.stderr,
                flush=True,
            )
        plain, drafted = (runs[streams, name][-1].texts for name in ("engine, plain", "engine"))
        check(chosen, plain, drafted)
    return runs


def check(
    args: Any,
    target: Target,
    prompts: Sequence[Prompt],
    plain: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
) -> None:
    """Stop if a text with drafts is not the target's own."""
    judging = trusted(args, target)
    for prompt, own, text in zip(prompts, plain, drafted, strict=True):
        if own == text:
            continue
        ids = chat_ids(target, prompt.turns[0])
        found = judge(judging, ids, own, text, max_new_tokens=args.max_new_tokens)
        if not found.lossless:
            raise SystemExit(f"Texts differ ({found}); no figures.")


def figures(name: str, streams: int, runs: Sequence[Run]) -> dict[str, Any]:
    """What the runs of one way come to."""
    gaps = [gap for run in runs for gap in run.gaps_s]
    return {
        "way": name,
        "streams": streams,
        "tokens_per_s": spread([run.tokens / run.seconds for run in runs]),
        "tokens_per_cpu_s": spread([run.tokens / run.cpu_s for run in runs]),
        "gap_ms": {f"p{p}": 1e3 * float(np.percentile(gaps or [0.0], p)) for p in (50, 99)},
        "first_ms": 1e3 * statistics.median(one for run in runs for one in run.first_s),
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """The figures, one line each."""
    plain = {(f["way"], f["streams"]): f for f in found if f["way"].endswith(", plain")}
    lines = ["streams  way             tokens/s  p50 ms  p99 ms  over plain  by CPU time"]
    for one in found:
        line = f"{one['streams']:7}  {one['way']:14} {one['tokens_per_s']['median']:9.1f} "
        line += f"{one['gap_ms']['p50']:7.1f} {one['gap_ms']['p99']:7.1f}"
        if own := plain.get((f"{one['way']}, plain", one["streams"])):
            for speed in ("tokens_per_s", "tokens_per_cpu_s"):
                line += f"{one[speed]['median'] / own[speed]['median']:12.3f}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
