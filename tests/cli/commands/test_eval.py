"""`moaspec eval`: what it prints, writes, resumes and refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from commands import Cli, interrupt_after, load_targets_by
from moaspec.backends import load
from moaspec.cli.method_loading import MethodSources, check_methods
from moaspec.evaluate.methods import Method, MethodRun
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.drafting.draft_tree import DraftTree, walk
from moaspec_core.errors import InputError

PROMPT = "w5 w9 w2"


def suite(directory: Path) -> Path:
    for name, words in (("a", [PROMPT, "w7 w1"]), ("b", ["w33 w0"])):
        lines = [json.dumps({"turns": [text]}) for text in words]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    return directory


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_eval(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "results" / "deep"
    options = ("--max-new-tokens", "6", "--methods", "hf,plain,moa@chain:3", "--out", str(out))
    output = cli("eval", "--suite", str(suite(tmp_path)), *options)
    assert output.code == 0
    for words in ("moa@chain:3", "tau by suite", "the target's own rounding"):
        assert words in output.words
    report = json.loads((out / "report.json").read_text())
    assert report["methods"]["moa@chain:3"]["lossless"] is True


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--methods", "plain,nosuch"), "Unknown method 'nosuch'"),
        (("--methods", "plain,plain"), "named twice"),
        (("--methods", "plain,eagle"), "--checkpoint eagle=DIR"),
        (("--methods", "plain", "--checkpoint", "eagle=there"), "is not used"),
        (("--methods", "moa", "--model", "nosuch"), "--drafter DIR"),
        (("--drafter", "nosuch"), "No drafter 'nosuch'"),
        (("--methods", "hf-assisted", "--checkpoint", "hf-assisted=no"), "Unknown target 'no'"),
        (("--methods", "eagle", "--checkpoint", "eagle=nosuch"), "No drafter 'nosuch'"),
    ],
)
def test_wrong_methods_are_refused_before_a_target_is_loaded(
    cli: Cli, options: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_targets_by(monkeypatch, lambda *_, **__: pytest.fail("a target is loaded"))
    monkeypatch.setattr(load, "fastest_dtype", lambda *_, **__: pytest.fail("compiled"))
    output = cli("eval", *options)
    assert output.code == 2
    assert why in output.err


@pytest.mark.parametrize(
    ("method", "why"),
    [("moa:3", "n0 to n"), ("moa:n2", "trained for N = 0"), ("replay:2", "within 0..1")],
)
def test_wrong_settings_are_refused_before_a_target_is_loaded(
    cli: Cli, method: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.model().save_pretrained(tmp_path)
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path / "drafter")
    load_targets_by(monkeypatch, lambda *_, **__: pytest.fail("a target is loaded"))
    options = ("--model", str(tmp_path), "--drafter", str(tmp_path / "drafter"))
    output = cli("eval", *options, "--methods", method)
    assert output.code == 2
    assert why in output.error


def test_the_drafter_that_is_loaded_decides_which_n_it_has(tmp_path: Path) -> None:
    """`--checkpoint moa=DIR` comes before `--drafter`."""
    model, first, second = (str(tmp_path / name) for name in ("model", "first", "second"))
    tiny.model().save_pretrained(model)
    save_drafter(tiny.random_drafter(tiny.target()), first)
    save_drafter(tiny.random_drafter(tiny.target(), exits=(2,)), second)
    sources = MethodSources(model, "float32", first, {"moa": second})
    check_methods(["moa:n2"], sources)
    with pytest.raises(InputError, match="trained for N = 2"):
        check_methods(["moa:n0"], sources)


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_results_become_a_page(cli: Cli, tmp_path: Path) -> None:
    """The methods that most users compare, on two prompts."""
    pytest.importorskip("matplotlib")
    methods = "hf,plain,moa,moa@tree:2x4x7,moa@tree:6x8x62"
    directory = tmp_path / "two"
    directory.mkdir()
    out, page = tmp_path / "results", tmp_path / "results.md"
    options = ("--limit", "1", "--max-new-tokens", "6", "--methods", methods, "--out", str(out))
    assert cli("eval", "--suite", str(suite(directory)), *options).code == 0
    output = cli("eval", "page", str(out), "--markdown", str(page))
    assert output.code == 0
    assert str(page) in output.out
    rows = [line for line in page.read_text().splitlines() if "| the target's |" in line]
    assert [row.split("`")[1] for row in rows] == methods.split(",")
    assert "<figure>" in (out / "report.html").read_text()


@pytest.mark.usefixtures("loaded")
def test_eval_as_json(cli: Cli) -> None:
    output = cli("eval", "--limit", "2", "--max-new-tokens", "3", "--methods", "plain", "--json")
    data = json.loads(output.out)
    assert list(data["methods"]) == ["plain"]
    assert len(data["methods"]["plain"]["prompts"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_a_different_text_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Method.run_many

    def wrong(self: Method, *args: Any) -> list[MethodRun]:
        runs = right(self, *args)
        if self.name == "moa":
            runs[0].token_ids[-1] = (runs[0].token_ids[-1] + 1) % tiny.VOCAB
        return runs

    monkeypatch.setattr(Method, "run_many", wrong)
    output = cli("eval", "--max-new-tokens", "5")
    assert output.code == 1
    assert "DIFFERENT" in output.out
    assert "lossy" in output.words


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "options",
    [
        ("--max-new-tokens", "0"),
        ("--limit", "0"),
        ("--methods", "eagle"),
        ("--methods", ""),
        ("--methods", "", "--tau-only", "moa"),
        ("--cost", "--cut", "4"),
        ("--cut", "4", "--repeats", "3"),
        ("--cost", "--batch", "2"),
        ("--cost", "--methods", "plain", "--temperature", "1"),
        ("--methods", "plain,hf", "--temperature", "1"),
        ("--methods", "plain", "--temperature", "-1"),
        ("--checkpoint", "eagle=nowhere"),
        ("--methods", "moa:n2"),
        ("--suite", "nowhere.jsonl"),
        ("--threads", "-1"),
    ],
)
def test_eval_refuses(options: tuple[str, ...], cli: Cli) -> None:
    output = cli("eval", *options)
    assert output.code == 2
    assert output.error


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_a_verifier_that_accepts_too_much_is_called_lossy(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fault is put in from outside: after each walk one more draft is accepted."""

    def generous(tree: DraftTree, chosen: Sequence[int]) -> list[int]:
        path = walk(tree, chosen)
        last = path[-1] if path else -1
        extra = [node for node, parent in enumerate(tree.parents) if parent == last]
        return path + extra[:1]

    monkeypatch.setattr("moaspec.engine.accept.walk", generous)
    options = ("--max-new-tokens", "8", "--methods", "plain,moa@chain:3", "--out", str(tmp_path))
    output = cli("eval", *options)
    assert output.code == 1
    assert "lossy" in output.words
    assert "1.00x" in output.words
    data = json.loads((tmp_path / "report.json").read_text())["methods"]["moa@chain:3"]
    assert (data["lossless"], data["median_speedup"]) == (False, None)
    assert all(part["median_speedup"] is None for part in data["suites"].values())


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_eval_resumes(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        "--suite",
        str(suite(tmp_path)),
        "--max-new-tokens",
        "4",
        "--out",
        str(tmp_path / "o"),
    )
    first = cli("eval", *options, "--json", "--repeats", "2", "--tau-only", "lookup@chain:3")
    assert first.code == 0

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("moaspec.evaluate.runner.WARM_UP_TOKENS", 1)
    monkeypatch.setattr("moaspec.evaluate.runner._Session._decode", fail)
    again = cli("eval", *options, "--json", "--repeats", "2", "--tau-only", "lookup@chain:3")
    assert json.loads(again.out) == json.loads(first.out)
    other = cli("eval", *options, "--repeats", "3")
    assert other.code == 2
    assert "repeats was 2 and is 3" in " ".join(other.err.split())


@pytest.mark.usefixtures("loaded")
def test_throughput_is_called_so(cli: Cli) -> None:
    output = cli("eval", "--max-new-tokens", "3", "--batch", "4", "--methods", "plain,moa")
    assert output.code == 0
    assert "throughput" in output.words
    refused = cli("eval", "--max-new-tokens", "3", "--batch", "4", "--methods", "plain,hf")
    assert refused.code == 2
    assert "one prompt at a time" in refused.err


@pytest.mark.usefixtures("loaded")
def test_cost(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXTS", (32, 64)), ("BATCHES", (1, 2)), ("WIDTHS", (1, 2))):
        monkeypatch.setattr(f"eval_studies.pass_costs.{name}", value)
    output = cli("eval", "--cost", "--methods", "plain,moa@chain:2", "--out", str(tmp_path))
    assert output.code == 0
    assert "GB/s" in output.words
    data = json.loads((tmp_path / "costs.json").read_text())
    assert [(one["context"], one["batch"]) for one in data["rounds"]] == [
        (32, 1),
        (64, 1),
        (32, 2),
    ]


@pytest.mark.usefixtures("loaded")
def test_cut(cli: Cli, tmp_path: Path) -> None:
    options = ("--methods", "plain,moa", "--max-new-tokens", "8", "--out", str(tmp_path))
    output = cli("eval", "--cut", "3", "--limit", "2", *options)
    assert output.code == 0
    assert "agreement" in output.words
    data = json.loads((tmp_path / "cut.json").read_text())
    assert set(data["methods"]) == {"target", "moa"}
    assert cli("eval", "--cut", "8", *options).code == 2
    assert cli("eval", "--cut", "3", "--methods", "plain").code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("options", "function", "name"),
    [
        (("--cost",), "eval_studies.pass_costs._round_cost", "costs.json"),
        (
            ("--cut", "3", "--max-new-tokens", "8"),
            "eval_studies.cut_quality._texts",
            "cut.json",
        ),
    ],
)
def test_what_was_measured_before_ctrl_c_is_shown_and_kept(
    options: tuple[str, ...],
    function: str,
    name: str,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for length, value in (("CONTEXTS", (32, 64)), ("BATCHES", (1,)), ("WIDTHS", (1, 2))):
        monkeypatch.setattr(f"eval_studies.pass_costs.{length}", value)
    interrupt_after(1, function, monkeypatch)
    command = ("eval", *options, "--methods", "moa@chain:2", "--out", str(tmp_path))
    output = cli(*command)
    assert output.code == 130
    assert "moa" in output.out
    assert "Stopped" in output.err
    data = json.loads((tmp_path / name).read_text())
    assert data["interrupted"]
    assert (
        len(data["rounds"] if "rounds" in data else data["methods"]["moa@chain:2"]["prompts"]) == 1
    )
    (tmp_path / name).write_text("of before")
    interrupt_after(1, function, monkeypatch)
    output = cli(*command)
    assert output.code == 130
    assert "stays as it was" in output.err
    assert (tmp_path / name).read_text() == "of before"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("option", "function"),
    [
        (("--cost",), "eval_studies.pass_costs.pass_s"),
        (("--cut", "3"), "eval_studies.cut_quality._texts"),
    ],
)
def test_ctrl_c_before_anything_was_measured(
    option: tuple[str, ...], function: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(0, function, monkeypatch)
    output = cli("eval", *option, "--methods", "moa@chain:2")
    assert (output.code, output.out) == (130, "")
    assert "Traceback" not in output.err


@pytest.mark.usefixtures("loaded")
def test_accuracy_under_a_cut(cli: Cli, tmp_path: Path) -> None:
    """The target's last number is known, so its answer is right; words carry numbers."""
    path = tmp_path / "gsm8k.jsonl"
    last = tiny.own_text(tiny.target(), [5, 9, 2], 8)[-1]
    path.write_text(json.dumps({"prompt": PROMPT, "reference": f"#### {last}"}))
    options = ("--suite", str(path), "--methods", "moa", "--max-new-tokens", "8", "--cut", "3")
    output = cli("eval", *options, "--accuracy", "--out", str(tmp_path))
    assert output.code == 0
    assert "accuracy" in output.words
    data = json.loads((tmp_path / "cut.json").read_text())["methods"]
    assert data["target"]["accuracy"] == 1.0
    assert data["moa"]["prompts"][0]["right"] is not None
    plain = json.loads(cli("eval", *options, "--json").out)
    assert plain["methods"]["target"]["accuracy"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_compare(cli: Cli, tmp_path: Path) -> None:
    before, after = str(tmp_path / "a"), str(tmp_path / "b")
    for out in (before, after):
        cli("eval", "--max-new-tokens", "5", "--methods", "plain,moa", "--out", out)
    output = cli("eval", "compare", before, str(tmp_path / "b" / "report.json"))
    assert output.code == 0
    assert "+0.00" in output.words
    data = json.loads(cli("eval", "compare", before, after, "--json").out)
    assert [change["method"] for change in data["changes"]] == ["plain", "moa"]
    missing = cli("eval", "compare", before, str(tmp_path / "nowhere"))
    assert missing.code == 2
    assert "Cannot read the report" in missing.err


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--suite", "paper"), "MOASPEC_SUITES"),
        (("--repeats", "0"), "repeats"),
        (("--methods", "plain,plain"), "twice"),
        (("--methods", "plain", "--tau-only", "plain"), "twice"),
        (("--methods", "hf-assisted"), "--checkpoint hf-assisted=DIR"),
        (("--checkpoint", "eagle"), "KIND=DIR"),
        (("--checkpoint", "bogus=/tmp"), "got 'bogus'"),
        (("--accuracy",), "--cut"),
        (("--out", "/proc/nothing"), "Cannot write results"),
    ],
)
def test_what_is_missing_is_named(
    options: tuple[str, ...], message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOASPEC_SUITES", raising=False)
    output = cli("eval", *options)
    assert output.code == 2
    assert message in " ".join(output.err.split())
    assert "Traceback" not in output.err
