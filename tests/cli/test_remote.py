"""`moaspec remote` and `moaspec edge-bench`, with a real server beside them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import moaspec
from bundles import save_bundle
from commands import Cli
from moaspec.decode import load_drafter
from moaspec.remote import GrpcServer, ServerOptions, TargetService
from moaspec.target import load_target

PROMPT = "w1 w2 <private>w3</private> w4"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bundle(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    """A server in a thread of its own."""
    found: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        target = load_target(bundle.parent / "target")
        drafter = load_drafter(bundle.parent / "drafter", target=target)
        where = ServerOptions(host="127.0.0.1", port=0)
        async with GrpcServer(TargetService(target, drafter), where) as server:
            found.append(f"127.0.0.1:{server.port}")
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


def expected(bundle: Path, words: str, new_tokens: int) -> list[int]:
    target = load_target(bundle.parent / "target")
    assert target.tokenizer is not None
    ids = list(target.tokenizer(words)["input_ids"])
    return moaspec.generate(target, ids, max_new_tokens=new_tokens).token_ids


def test_the_text_is_the_targets_and_private_words_stay(
    cli: Cli, bundle: Path, address: str
) -> None:
    output = cli(
        *("remote", PROMPT, "--server", address, "--bundle", str(bundle)),
        *("--max-new-tokens", "12", "--json"),
    )
    assert output.code == 0, output.err
    facts = json.loads(output.out)
    # What the server was asked: the tiny tokenizer reads a placeholder as its unknown word.
    assert facts["token_ids"] == expected(bundle, "w1 w2 [PRIVATE_1] w4", 12)
    assert facts["private_spans"] == 1
    assert facts["bytes_up"] > 0


def test_a_cut_is_shown_and_changes_nothing(cli: Cli, bundle: Path, address: str) -> None:
    arguments = ("remote", "w1 w2", "--server", address, "--bundle", str(bundle))
    cut = ("--max-new-tokens", "16", "--cut-after", "5", "--cut-s", "1.2")
    output = cli(*arguments, *cut)
    assert output.code == 0, output.err
    assert "link cut for 1.2 s" in output.words
    assert "link back" in output.words
    facts = json.loads(cli(*arguments, *cut, "--json").out)
    assert facts["token_ids"] == expected(bundle, "w1 w2", 16)
    assert facts["cuts"] >= 1
    assert facts["provisional"] > 0


def test_what_cannot_be(cli: Cli, bundle: Path) -> None:
    open_mark = cli("remote", "w1 <private>w2", "--bundle", str(bundle))
    assert open_mark.code == 2
    assert "never closed" in open_mark.err
    no_bundle = cli("remote", "w1", "--model", "somebody/else")
    assert no_bundle.code == 2
    assert "export-device" in no_bundle.err


def test_edge_bench_without_emulation(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    arguments = (
        *("edge-bench", "--model", str(bundle.parent / "target")),
        *("--drafter", str(bundle.parent / "drafter"), "--links", "none", "--limit", "1"),
        *("--modes", "plain,ahead", "--drafters", "moa", "--max-new-tokens", "6"),
    )
    output = cli(*arguments, "--out", str(tmp_path / "edge.json"))
    assert output.code == 0, output.err
    assert "ahead moa@0" in output.words
    rows = json.loads((tmp_path / "edge.json").read_text())["links"]["none"]["rows"]
    assert [row["same_text"] for row in rows] == [True, True]


@pytest.mark.parametrize(
    "wrong", [("--links", "6g"), ("--links", "none", "--cut", "4"), ("--modes", "magic")]
)
def test_edge_bench_refuses(cli: Cli, bundle: Path, wrong: tuple[str, ...]) -> None:
    target, drafter = str(bundle.parent / "target"), str(bundle.parent / "drafter")
    output = cli("edge-bench", "--model", target, "--drafter", drafter, *wrong)
    assert output.code == 2
