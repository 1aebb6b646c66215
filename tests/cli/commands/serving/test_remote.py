"""`moaspec remote` and `moaspec edge-bench`, with a real server beside them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import moaspec
import tiny
from bundles import save_bundle
from commands import Cli
from moaspec.backends.load import load_target
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, save_drafter
from moaspec.model.checkpoint.moa_config import config_from_json
from moaspec.model.moa import MoADrafter
from moaspec_core.engine.request_state import Source
from moaspec_core.errors import RefusedError
from moaspec_core.privacy.vault import Vault
from moaspec_core.support.paths import cache_dir
from moaspec_core.support.ports import bind
from moaspec_edge.cli import device_options
from moaspec_edge.cli.device_options import DeviceOptions
from moaspec_edge.cli.remote import _Show
from moaspec_edge.device.bundle import DeviceBundle
from moaspec_edge.device.events import RemoteEvent
from moaspec_edge.emulation import ShapedTransport
from server_in_thread import server_in_thread

pytestmark = pytest.mark.essential

PROMPT = "w1 w2 <private>w3</private> w4"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bundle(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    """Of a server in a thread of its own."""
    with server_in_thread(bundle.parent) as found:
        yield found


def expected(bundle: Path, words: str, new_tokens: int, **sampling: Any) -> list[int]:
    target = load_target(bundle.parent / "target")
    assert target.tokenizer is not None
    ids = list(target.tokenizer(words)["input_ids"])
    return moaspec.generate(target, ids, max_new_tokens=new_tokens, **sampling).token_ids


def test_the_text_is_the_targets_and_private_words_stay(
    cli: Cli, bundle: Path, address: str
) -> None:
    output = cli(
        *("remote", PROMPT, "--server", address, "--bundle", str(bundle)),
        *("--max-new-tokens", "12", "--json"),
    )
    assert output.code == 0, output.err
    data = json.loads(output.out)
    # What the server was asked: the tiny tokenizer reads a placeholder as its unknown word.
    assert data["token_ids"] == expected(bundle, "w1 w2 [PRIVATE_1] w4", 12)
    assert data["private_spans"] == 1
    assert data["bytes_up"] > 0


def test_sampling_is_as_on_one_machine(cli: Cli, bundle: Path, address: str) -> None:
    """All settings of `generate` cross the link."""
    asked = ("remote", "w1 w2", "--server", address, "--bundle", str(bundle))
    options = (
        *("--temperature", "1.4", "--seed", "5", "--top-k", "30", "--min-p", "0.01"),
        *("--repetition-penalty", "1.2", "--max-new-tokens", "14", "--json"),
    )
    settings = {"temperature": 1.4, "seed": 5, "top_k": 30, "min_p": 0.01}
    output = cli(*asked, *options)
    assert output.code == 0, output.err
    right = expected(bundle, "w1 w2", 14, **settings, repetition_penalty=1.2)
    assert json.loads(output.out)["token_ids"] == right
    assert right != expected(bundle, "w1 w2", 14)
    wrong = cli(*asked, "--min-p", "2")
    assert wrong.code == 2
    assert "min_p" in wrong.err


@pytest.mark.slow
def test_a_cut_is_shown_and_changes_nothing(cli: Cli, bundle: Path, address: str) -> None:
    arguments = ("remote", "w1 w2", "--server", address, "--bundle", str(bundle))
    cut = ("--max-new-tokens", "16", "--cut-after", "5")
    output = cli(*arguments, *cut)
    assert output.code == 0, output.err
    notes = " ".join(output.err.split())
    for note in ("[link cut for 3 s]", "[no link: text waits", "[link back", "16 tokens in"):
        assert note in notes
    data = json.loads(cli(*arguments, *cut, "--json").out)
    assert data["token_ids"] == expected(bundle, "w1 w2", 16)
    assert data["cuts"] >= 1
    assert data["provisional"] > 0
    assert output.out == data["text"] + "\n"  # no terminal, so nothing that was taken back


@pytest.fixture
def bundled(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the drafter that is bundled for "tiny"."""
    directory = tmp_path / "bundled"
    shutil.copytree(bundle.parent / "drafter", directory)
    target = load_target(bundle.parent / "target", dtype="bfloat16", packed=False)
    for load in ("load_target", "read_skeleton"):
        monkeypatch.setattr(f"moaspec_edge.device.bundle.{load}", lambda *_, **__: target)
    monkeypatch.setattr(
        "moaspec_edge.cli.device_options.bundled_drafters", lambda: {"tiny": directory}
    )
    return directory


@pytest.fixture(autouse=True)
def _a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaspec_edge.cli.edge.bind", lambda *_: bind("127.0.0.1", 0))


def test_a_planted_bundle_is_not_loaded(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bundled.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = device_options._made_bundle("tiny")
    (planted / "config.json").chmod(0o666)
    made = device_options._made_bundle("tiny")
    assert made != planted
    assert made.is_relative_to(tmp_path / f"moaspec-{os.getuid()}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "target/tokenizer.json"])
@pytest.mark.usefixtures("bundled")
def test_a_damaged_made_bundle_is_made_anew(name: str) -> None:
    made = device_options._made_bundle("tiny")
    content = (made / name).read_bytes()
    (made / name).write_bytes(content[: len(content) // 2])
    assert isinstance(DeviceOptions(model="tiny").load(), DeviceBundle)
    assert (made / name).read_bytes() == content


def test_the_made_bundle_is_of_the_bundled_drafter(bundled: Path) -> None:
    """An upgrade may bring another one, and servers then have that."""
    first = DeviceOptions(model="tiny").load()
    assert isinstance(first, DeviceBundle)
    written = sorted(cache_dir().rglob("*"))
    assert DeviceOptions(model="tiny").load().fingerprint == first.fingerprint
    assert sorted(cache_dir().rglob("*")) == written  # made once
    torch.manual_seed(2)
    upgraded = MoADrafter(config_from_json(first.info.drafter))
    save_drafter(upgraded, bundled)
    found = DeviceOptions(model="tiny").load().fingerprint
    assert found == fingerprint(upgraded) != first.fingerprint


def test_edge_loads_a_bundle_and_never_the_target(
    cli: Cli, bundle: Path, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(
        "moaspec_serve.uvicorn_server.serve", lambda source, *_, **__: served.append(source)
    )
    prefixes = tmp_path / "prefixes"
    output = cli("edge", "--model", "tiny", "--give-up-s", "5", "--prefix-dir", str(prefixes))
    assert output.code == 0, output.err
    assert bundled.is_dir()
    assert isinstance(served[0]._device, DeviceBundle)
    assert served[0]._options.give_up_s == 5
    assert served[0]._options.prefix_dir == prefixes
    for options, name in (((), "bundle"), (("--model", "mine"), "mine")):
        assert cli("edge", "--bundle", str(bundle), *options).code == 0
        assert served.pop().info.name == name


def test_the_options_of_the_link(cli: Cli, bundle: Path, address: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    output = cli(
        # Of two servers one is not there.
        *("remote", "w1 w2", "--server", f"127.0.0.1:1,{address}", "--bundle", str(bundle)),
        "--json",
        *("--codec", "fp16", "--tree", "chain:2", "--num-target-layers", "0"),
        *("--token-file", str(token), "--max-new-tokens", "12"),
    )
    assert output.code == 0, output.err
    assert json.loads(output.out)["token_ids"] == expected(bundle, "w1 w2", 12)


def test_links_are_emulated_only_where_one_is_asked_for(
    cli: Cli, bundle: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def shaped(*arguments: Any) -> ShapedTransport:
        made.append(arguments)
        return ShapedTransport(*arguments)

    monkeypatch.setattr("moaspec_edge.emulation.ShapedTransport", shaped)
    arguments = ("remote", "w1", "--server", address, "--bundle", str(bundle))
    for asked in ((), ("--link", "lan"), ("--cut-after", "50")):
        made.clear()
        assert cli(*arguments, "--max-new-tokens", "2", *asked).code == 0
        assert bool(made) is bool(asked)


def fail() -> None:
    raise RefusedError("The server refuses.")


@pytest.mark.parametrize(
    ("happens", "code"), [(lambda: signal.raise_signal(signal.SIGINT), 130), (fail, 1)]
)
def test_the_line_of_a_text_ends_however_the_stream_does(
    cli: Cli,
    bundle: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[], None],
    code: int,
) -> None:
    def shown(self: _Show, event: RemoteEvent) -> None:
        show(self, event)
        if len(self.text) > 2:
            happens()

    show = _Show.event
    monkeypatch.setattr(_Show, "event", shown)
    output = cli("remote", "w1 w2", "--server", address, "--bundle", str(bundle))
    assert output.code == code
    assert output.out.rstrip()
    assert output.out == output.out.rstrip() + "\n"


@pytest.mark.slow
def test_a_server_that_is_not_there(
    cli: Cli, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaspec_edge.cli.remote.PATIENCE_S", 0.1)
    arguments = ("--server", "127.0.0.1:1", "--bundle", str(bundle), "--give-up-s", "1")
    output = cli("remote", "w1", *arguments)
    assert output.code == 1
    said = " ".join(output.err.split())
    assert said.count("No link to ws://127.0.0.1:1; trying again.") == 1
    assert "Does `moaspec target-server` run there? Ctrl-C ends, --give-up-s limits" in said
    assert "No link to ws://127.0.0.1:1 for 1 s" in said


@pytest.mark.slow
def test_a_server_that_goes_away(cli: Cli, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(server_in_thread(bundle.parent))

        def shown(self: _Show, event: RemoteEvent) -> None:
            show(self, event)
            if len(self.text) > 2:
                monkeypatch.setattr("moaspec_edge.cli.remote.PATIENCE_S", 0.1)
                stack.close()

        show = _Show.event
        monkeypatch.setattr(_Show, "event", shown)
        arguments = ("--server", address, "--bundle", str(bundle), "--give-up-s", "3")
        output = cli("remote", "w1 w2", *arguments, "--on-cut", "wait")
    assert output.code == 1
    assert output.out.endswith("\n")
    assert " ".join(output.err.split()).count(f"No link to {address}; trying again.") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ("remote", "w1", "--tree", "chain"),
        ("remote", "w1", "--phone-region", "germany"),
        ("remote", "w1", "--link", "6g"),
        ("remote", "w1", "--token-file", "/nowhere/token"),
        ("edge", "--tree", "tree:2"),
        ("edge", "--phone-region", "XX"),
        ("edge", "--link", "6g"),
    ],
)
def test_options_that_cannot_be_read_are_refused_before_loading(
    cli: Cli, wrong: tuple[str, ...]
) -> None:
    output = cli(*wrong)
    assert output.code == 2
    assert "Loading" not in output.err
    assert "Error:" in output.err


@pytest.mark.parametrize("command", [("remote", "w1"), ("edge",)])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--server", "example.org"), "HOST:PORT"),
        (("--server", "http://example.org:50051"), "HOST:PORT"),
        (("--server", "example.org:99999"), "HOST:PORT"),
        (("--server", "example.org:0"), "name a port"),
        (("--server", "example.org:50051,example.com"), "HOST:PORT"),
        (("--server", "ws://example.org/?token=secret"), "ws://HOST:PORT"),
        (("--bundle", "/nowhere/bundle"), "export-device"),
        (("--model", "somebody/else"), "export-device"),
        (("--codec", "int3"), "'int3' is not one of 'fp16', 'int8', 'int4'"),
        (("--certificate", __file__), "comes with its key"),
        *(
            ((option, "/dev/null/pem"), f"{option} /dev/null/pem cannot be read: Not a directory.")
            for option in ("--ca", "--certificate", "--key", "--token-file")
        ),
        (("--token-file", "/dev/null"), "is a device, and must be a file"),
    ],
)
def test_bad_options_of_devices(
    cli: Cli, command: tuple[str, ...], wrong: tuple[str, ...], why: str
) -> None:
    output = cli(*command, *wrong)
    assert output.code == 2
    assert why in " ".join(output.err.split())


def test_tokens_come_from_the_environment_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOASPEC_TOKEN", "secret\n")
    output = cli("remote", "w1", "--server", "example.org:50051")
    assert output.code == 2
    assert "would travel in the clear" in " ".join(output.err.split())


class Noting(_Show):
    """Notes what it tells of the link."""

    def __init__(self) -> None:
        super().__init__(tiny.tokenizer(), Vault(()), quiet=True, live=True)
        self.notes: list[str] = []

    def note(self, words: str) -> None:
        self.notes.append(words)


def told(*events: RemoteEvent) -> list[str]:
    show = Noting()
    for one in events:
        show.event(one)
    return show.notes


def event(start: int, *token_ids: int, **data: Any) -> RemoteEvent:
    drafts: list[Source] = ["draft"] * len(token_ids)
    return RemoteEvent(start=start, token_ids=token_ids, sources=tuple(drafts), **data)


@pytest.mark.parametrize(("live", "shown"), [(True, "w1 w2 w4w1 w3\n"), (False, "w1 w3\n")])
def test_only_a_terminal_shows_text_before_it_is_verified(
    capsys: pytest.CaptureFixture[str], live: bool, shown: str
) -> None:
    tokenizer = tiny.tokenizer()
    one, two, three, four = tokenizer("w1 w2 w3 w4")["input_ids"]
    show = _Show(tokenizer, Vault(()), quiet=False, live=live)
    show.event(event(0, one))
    show.event(event(1, two, num_provisional=1, link="down"))
    show.event(event(2, four, num_provisional=1, link="down"))
    show.event(event(1, three, num_corrected=2, stop_reason="length"))
    show.close()
    printed = capsys.readouterr()
    assert printed.out.replace("\n", "") + "\n" == shown
    assert "[link back: 2 replaced]" in printed.err
    assert ("[no link: text waits]" in printed.err) is not live


@pytest.mark.parametrize(
    ("corrected", "note"), [(0, "[link back: all of it stays]"), (2, "[link back: 2 replaced]")]
)
def test_the_return_of_a_link_is_told_once_all_is_verified(corrected: int, note: str) -> None:
    """A server that was restarted confirms one token when it has read the text, then the rest."""
    alone = [event(i, i + 1, num_provisional=1, link="down") for i in range(3)]
    first = event(0, 1, 2, 3, num_provisional=2)
    assert told(*alone, first) == []
    rest = event(1, 2, 3, num_corrected=corrected)
    assert told(*alone, first, rest, event(3, 4)) == [note]


def test_what_cannot_be(cli: Cli, bundle: Path) -> None:
    both = cli("remote", "w1", "--model", "tiny", "--bundle", str(bundle))
    assert both.code == 2
    assert "leave --model out" in both.err
    open_mark = cli("remote", "w1 <private>w2", "--bundle", str(bundle))
    assert open_mark.code == 2
    assert "never closed" in open_mark.err


@pytest.mark.slow
def test_edge_bench_without_emulation(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    arguments = (
        *("edge-bench", "--model", str(bundle.parent / "target")),
        *("--drafter", str(bundle.parent / "drafter"), "--link", "none", "--limit", "1"),
        *("--modes", "plain,ahead", "--drafters", "moa", "--max-new-tokens", "6"),
    )
    output = cli(*arguments, "--out", str(tmp_path / "edge.json"))
    assert output.code == 0, output.err
    assert "round trip" in output.words
    rows = json.loads((tmp_path / "edge.json").read_text())["links"]["none"]["rows"]
    assert [row["name"] for row in rows] == ["plain", "ahead moa@0"]
    assert [row["same_text"] for row in rows] == [True, True]


@pytest.mark.slow
def test_edge_bench_with_a_drafter_that_lacks_0(cli: Cli, tmp_path: Path) -> None:
    """It had asked every drafter for N = 0."""
    bundle = save_bundle(tmp_path, num_target_layers=(1, 2))
    arguments = (
        *("edge-bench", "--model", str(bundle.parent / "target")),
        *("--drafter", str(bundle.parent / "drafter"), "--link", "none", "--limit", "1"),
        *("--modes", "plain,sync", "--max-new-tokens", "6"),
    )
    output = cli(*arguments, "--json")
    assert output.code == 0, output.err
    rows = json.loads(output.out)["links"]["none"]["rows"]
    assert "sync moa@1" in [row["name"] for row in rows]
    refused = cli(*arguments, "--num-target-layers", "0")
    assert refused.code == 2
    assert "the drafter was trained for N = 1, 2" in " ".join(refused.err.split())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--link", "6g"), "Unknown link"),
        (("--link", "none", "--cut-after", "4"), "cannot be cut"),
        (("--modes", "magic"), "Unknown mode"),
        (("--num-target-layers", ""), "--num-target-layers takes numbers"),
        (("--server-speed", "abc"), "--server-speed takes numbers"),
        (("--limit", "0"), "--limit"),
        (("--link", ","), "links: at least one is needed"),
        (("--out", "/dev/null/edge.json"), "/dev/null/edge.json cannot be written"),
    ],
)
def test_edge_bench_refuses(cli: Cli, bundle: Path, wrong: tuple[str, ...], why: str) -> None:
    target, drafter = str(bundle.parent / "target"), str(bundle.parent / "drafter")
    output = cli("edge-bench", "--model", target, "--drafter", drafter, *wrong)
    assert output.code == 2
    assert why in " ".join(output.err.split())


def test_edge_bench_shows_what_it_cannot_write(
    cli: Cli, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results" / "edge.json"

    def measured(*_: Any) -> dict[str, Any]:
        out.mkdir(parents=True)
        return {"links": {}}

    monkeypatch.setattr("edge_bench.bench.run_edge_bench", measured)
    target, drafter = str(bundle.parent / "target"), str(bundle.parent / "drafter")
    output = cli(
        *("edge-bench", "--model", target, "--drafter", drafter, "--json", "--out", str(out))
    )
    assert output.code == 1
    assert json.loads(output.out) == {"links": {}}
