"""The commands: what they print, and their exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hybrid_models
import moaspec
import moaspec.generation.api
import tiny
from commands import Cli, load_targets_by, text_target
from costs import know, table
from moaspec.calibration.choose_layers import best_option, layers_options
from moaspec.calibration.measure_costs import calibrate, stored_costs
from moaspec.cli.loading import measure_once, warn_unmeasured
from moaspec.evaluate.correctness.check_target import Check, CheckedText, Told
from moaspec.model.baselines import EagleDrafter, StackConfig
from moaspec.model.checkpoint.baseline_checkpoint import save_baseline
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.model.checkpoint.moa_config import SECTION
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.cli.entry import open_closed_streams
from moaspec_core.cli.main import app, run
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Event
from moaspec_core.errors import InputError, ShapeError, TrainingError
from moaspec_core.policy.cost_model import CostTable
from moaspec_core.support.paths import cache_dir

PROMPT = "w5 w9 w2"
OWN = tiny.own_texts("llama")[0]
TEXT = " ".join(f"w{token}" for token in OWN)
COMMANDS = (
    "generate",
    "chat",
    "models",
    "info",
    "train",
    "calibrate",
    "demo",
    "eval",
    "check",
    "checkpoint",
    "remote",
    "edge-bench",
)


# Measuring


@pytest.mark.slow
def test_calibrate_measures_once_for_all(cli: Cli, loaded: Target) -> None:
    output = cli("calibrate")
    assert output.code == 0
    assert "head and choice" in output.words
    assert "auto will" in output.words
    assert stored_costs(loaded, tiny.agreeing_drafter("llama")) is not None


@pytest.mark.slow
def test_calibrate_as_json(cli: Cli, loaded: Target) -> None:
    assert loaded.tokenizer is not None
    info = json.loads(cli("calibrate", "--json").out)
    assert len(info["pass_s"][0]) == len(info["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(), ((0.5,),)], ids=["not recorded", "recorded"])
def test_calibrate_tells_what_each_exit_promises(
    rates: tuple[tuple[float, ...], ...],
    cli: Cli,
    loaded: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tiny.random_drafter(loaded, exits=(0, 2))
    module.config = dataclasses.replace(
        module.config, acceptance=rates, further_acceptance=(rates,) if rates else ()
    )
    monkeypatch.setattr("moaspec.generation.drafters.load_any_drafter", lambda *_, **__: module)
    info = json.loads(cli("calibrate", "--json").out)
    options = layers_options(loaded, module)
    assert info["speedups"] == {str(one.num_target_layers): one.speedup for one in options}
    assert info["num_target_layers"] == best_option(options).num_target_layers
    assert (None in info["speedups"].values()) == (not rates)
    output = cli("calibrate")  # which measures anew, and may find the other N better
    assert output.code == 0
    for n in (0, 2):
        assert f"N = {n}: drafting" in output.words
    chosen = best_option(layers_options(loaded, module)).num_target_layers
    assert f" with N = {chosen} " in output.words.partition("auto will")[2]
    assert ("records no rates" in output.words) == (not rates)


@pytest.mark.slow
def test_calibrate_without_a_drafter_promises_nothing(
    cli: Cli, loaded: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded.tokenizer is not None
    monkeypatch.setattr("moaspec.cli.loading.bundled_drafters", dict)
    output = cli("calibrate")
    assert output.code == 0
    assert "auto will" not in output.words
    assert "speedups" not in json.loads(cli("calibrate", "--json").out)


@pytest.mark.slow
@pytest.mark.parametrize(("pass_s", "decision"), [(1e-9, "plainly"), (1.0, "as far as it pays")])
def test_calibrate_tells_whether_drafts_pay(
    pass_s: float, decision: str, cli: Cli, loaded: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny.agreeing_drafter("llama")

    def measured(*_: Any, **__: Any) -> CostTable:
        widths = table(pass_s=((pass_s,) * 4, (pass_s,) * 4))
        know(monkeypatch, {module.config.num_target_layers[0]: widths})
        return widths

    monkeypatch.setattr("moaspec.calibration.measure_costs.calibrate", measured)
    words = cli("calibrate").words
    assert f"auto will {'decode' if decision == 'plainly' else 'draft'}" in words
    assert decision in words
    (option,) = layers_options(loaded, module)
    assert option.best_chain is not None
    assert f"{option.best_chain[1]:.2f}x" in words.partition("auto will")[2]


@pytest.mark.slow
def test_calibrate_on_a_busy_machine_says_what_becomes_of_it(
    cli: Cli, loaded: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = type(loaded)
    monkeypatch.setattr(target, "crowded", True)
    output = cli("calibrate")
    assert "too high. They are used until" in output.err
    output = cli("generate", PROMPT, "--raw", "--max-new-tokens", "4")
    assert "was measured while other processes used its CPU" in output.err
    monkeypatch.setattr(target, "crowded", False)
    assert "too high" not in cli("calibrate").err
    monkeypatch.setattr(target, "crowded", True)
    output = cli("calibrate", "--json")
    assert "are still used" in output.err
    assert not json.loads(output.out)["busy"]


@pytest.mark.slow
def test_why_a_machine_is_not_measured_is_told_once(
    loaded: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_unmeasured.cache_clear()
    for _ in range(2):
        measure_once(loaded, tiny.agreeing_drafter("llama"))
    assert capsys.readouterr().err.count("not measured") == 1


def test_nothing_measures_the_machine_unasked(cli: Cli, loaded: Target) -> None:
    assert cli("generate", PROMPT, "--raw", "--max-new-tokens", "4").code == 0
    assert stored_costs(loaded, tiny.agreeing_drafter("llama")) is None


# Help and lists


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"moaspec {command}" in " ".join(result.output.split())


def test_help_lists_all_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["nothing"], ["info"], ["generate", "x", "--what"]])
def test_bad_usage(arguments: list[str], cli: Cli) -> None:
    assert cli(*arguments).code == 2


def test_models(cli: Cli) -> None:
    output = cli("models")
    assert output.code == 0
    assert "smollm2-135m" in output.words
    assert "llama, qwen2" in output.words


def test_models_as_json(cli: Cli) -> None:
    info = json.loads(cli("models", "--json").out)
    assert info["models"][0]["alias"] == "smollm2-135m"
    assert "qwen2" in info["families"]


# info


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    drafter = tiny.random_drafter(tiny.target(), draft_token_ids=torch.tensor([3, 9]))
    save_drafter(drafter, tmp_path, dtype=torch.bfloat16, training={"steps": 77})
    return tmp_path


def test_info(checkpoint: Path, cli: Cli) -> None:
    output = cli("info", str(checkpoint))
    assert output.code == 0
    assert "bfloat16" in output.out


@pytest.mark.parametrize("columns", [50, 80])
def test_info_takes_a_line_per_fact(
    columns: int, checkpoint: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["training"] = {"config": {"data": [f"answers-{i}.jsonl" for i in range(9)]}}
    config[SECTION]["target"]["tokenizer_hash"] = digest = "0123456789abcdef" * 4
    path.write_text(json.dumps(config))
    output = cli("info", str(checkpoint))
    info = json.loads(cli("info", str(checkpoint), "--json").out)
    lines = output.out.splitlines()
    assert info["target"]["tokenizer_hash"] == digest
    (shown,) = (line for line in lines if line.startswith("target.tokenizer_hash "))
    assert digest.startswith(shown.split()[1].removesuffix("…"))
    (shown,) = (line for line in lines if line.startswith("training.config.data "))
    assert "answers-0.jsonl" in shown
    assert max(map(len, lines[1:])) <= 80
    num_lines = len(info) - 2 + len(info["target"]) + 1  # the parts of two, one of them a list
    assert len(lines) - 2 == num_lines
    assert "--json" in lines[-1]


def test_info_as_json(checkpoint: Path, cli: Cli) -> None:
    info = json.loads(cli("info", str(checkpoint), "--json").out)
    assert info["format"] == "moaspec"
    assert info["parameters"] == tiny.random_drafter(tiny.target()).num_parameters
    assert info["dtype"] == ["bfloat16"]
    assert info["num_target_layers"] == [0]
    assert info["draft_vocabulary"] == 2
    assert info["target"]["num_layers"] == 3
    assert info["training"] == {"steps": 77}


def test_info_of_a_published_checkpoint(checkpoint: Path, cli: Cli) -> None:
    (checkpoint / "config.json").write_text(json.dumps(tiny.target().config.to_dict()))
    info = json.loads(cli("info", str(checkpoint), "--json").out)
    assert (info["format"], info["target"]) == ("published", "not recorded")


def save_eagle(directory: Path) -> None:
    layer = LayerConfig(
        hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=56
    )
    rope = {"rope_theta": 10000.0}
    config = StackConfig(layer=layer, rope_parameters=rope, target=tiny.target().identity)
    save_baseline(EagleDrafter(config), directory)


def test_info_of_a_baseline(cli: Cli, tmp_path: Path) -> None:
    save_eagle(tmp_path)
    info = json.loads(cli("info", str(tmp_path), "--json").out)
    assert info["format"] == "baseline (eagle)"
    assert info["target"]["num_layers"] == 3


def test_a_baseline_is_not_converted(cli: Cli, tmp_path: Path) -> None:
    save_eagle(tmp_path / "eagle")
    eagle, out = str(tmp_path / "eagle"), str(tmp_path / "out")
    output = cli("checkpoint", "convert", eagle, out, "--to", "raw", *saved_target(tmp_path))
    assert output.code == 2
    assert "holds a baseline drafter; only a Mixture-of-Attentions" in " ".join(
        output.error.split()
    )


def test_the_output_of_a_run_names_its_drafter(
    checkpoint: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("run")
    shutil.copytree(checkpoint, run / "drafter")
    output = cli("info", str(run))
    assert output.code == 2
    assert f"Did you mean {run / 'drafter'}?" in output.err


@pytest.mark.parametrize("form", ["ours", "published"])
def test_info_of_what_is_not_all_of_a_drafter(form: str, checkpoint: Path, cli: Cli) -> None:
    if form == "published":
        (checkpoint / "config.json").write_text(json.dumps(tiny.target().config.to_dict()))
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["Ekv2E.weight"], tensors["Ekv2E.bias"]
    save_file(tensors, checkpoint / "model.safetensors")
    output = cli("info", str(checkpoint))
    assert output.code == 2
    assert "Tensors are missing in the checkpoint: Ekv2E" in output.err
    assert cli("checkpoint", "push", str(checkpoint), "someone/drafter").code == 2


def test_info_of_a_target(cli: Cli, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    output = cli("info", str(tmp_path))
    assert output.code == 2
    assert "Unexpected tensor" in output.err


def test_info_of_nothing(tmp_path: Path, cli: Cli) -> None:
    output = cli("info", str(tmp_path / "nowhere"))
    assert output.code == 2
    assert "No checkpoint" in output.err
    assert cli("info", str(tmp_path)).code == 2


def test_info_of_a_file(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    output = cli("info", str(path))
    assert output.code == 2
    assert "is a file" in output.err
    assert "--model" in output.err


# generate


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("options", [(), ("--drafter", "none"), ("--tree", "tree:3x2x6")])
def test_generate_streams_the_text(options: tuple[str, ...], cli: Cli) -> None:
    output = cli("generate", PROMPT, "--max-new-tokens", "24", *options)
    assert output.code == 0
    assert output.words == TEXT
    assert "24 tokens (max_new_tokens)" in " ".join(output.err.split())


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_generate_reads_a_pipe(
    arguments: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n"))
    assert cli("generate", *arguments, "--max-new-tokens", "24").words == TEXT


@pytest.mark.parametrize(("text", "arguments"), [("", ()), ("\n", ("-",))])
def test_generate_without_a_prompt(
    text: str, arguments: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    output = cli("generate", *arguments)
    assert output.code == 2
    assert "prompt" in output.err


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0"])
@pytest.mark.parametrize("option", [("serve", "--cache-gib"), ("target-server", "--cache-gib")])
def test_caches_of_no_size(option: tuple[str, str], size: str, cli: Cli) -> None:
    output = cli(*option, size)
    assert output.code == 2
    assert option[1] in output.err


def test_streams_that_are_closed_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_closed_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        assert sys.stdin.read() == ""
        assert sys.stdout.write("said") == sys.stderr.write("told")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1.00 TiB for an array"),
        RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
    ],
)
def test_too_little_memory(error: Exception, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Target:
        raise error

    load_targets_by(monkeypatch, load)
    output = cli("generate", "w1")
    assert output.code == 1
    assert output.error.startswith("Error: There is not enough memory: ")


def test_generate_refuses_a_pipe_that_is_no_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the C locale Python reads such bytes as halves of surrogate pairs."""
    piped = io.TextIOWrapper(io.BytesIO(b"w5\xff"), "utf-8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", piped)
    output = cli("generate")
    assert output.code == 2
    assert "UTF-8" in output.err


def test_generate_with_a_system_prompt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    target = text_target()
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    load_targets_by(monkeypatch, lambda *_, **__: target)
    options = ("--drafter", "none", "--json", "--max-new-tokens", "2", "--system", "w7 w8")
    assert json.loads(cli("generate", PROMPT, *options).out)["prompt_tokens"] == 5
    assert cli("generate", PROMPT, "--raw", *options).code == 2


@pytest.mark.usefixtures("loaded")
def test_generate_as_json(cli: Cli) -> None:
    output = cli("generate", PROMPT, "--max-new-tokens", "24", "--tree", "chain:3", "--json")
    info = json.loads(output.out)
    assert info["token_ids"] == list(OWN)
    assert info["text"] == TEXT
    assert info["prompt_tokens"] == 3
    assert info["stop_reason"] == "max_new_tokens"
    assert info["tau"] > 1.5
    assert sum(info["accept_lengths"]) == 23
    assert len(info["sources"]) == 24
    assert info["timing"]["total_s"] > 0


@pytest.mark.usefixtures("loaded")
def test_generate_samples_the_same_with_and_without_speculation(cli: Cli) -> None:
    settings = "--temperature 1.2 --top-p 0.9 --top-k 40 --min-p 0.01 --repetition-penalty 1.1"
    options = (*settings.split(), "--seed", "5", "--max-new-tokens", "12", "--json")
    plain = json.loads(cli("generate", PROMPT, "--drafter", "none", *options).out)
    drafted = json.loads(cli("generate", PROMPT, "--tree", "tree:3x2x6", *options).out)
    assert plain["token_ids"] == drafted["token_ids"] != list(OWN[:12])
    assert plain["seed"] == drafted["seed"] == 5


@pytest.mark.usefixtures("loaded")
def test_generate_stops_at_a_string(cli: Cli) -> None:
    stop = f"w{OWN[4]} w{OWN[5]}"
    output = cli("generate", PROMPT, "--stop", "nowhere", "--stop", stop)
    assert output.words == " ".join(f"w{token}" for token in OWN[:6])
    assert "stop_string" in output.err


@pytest.mark.usefixtures("loaded")
def test_one_token_has_no_tau(cli: Cli) -> None:
    output = cli("generate", PROMPT, "--max-new-tokens", "1")
    assert output.code == 0
    assert output.words == f"w{OWN[0]}"
    assert "tau" not in output.err


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_generated(
    as_json: bool, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Engine.step, []

    def interrupted(self: Engine) -> list[Event]:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    options = ["--json"] if as_json else []
    output = cli("generate", PROMPT, "--tree", "chain:3", *options)
    assert output.code == 130
    assert "Traceback" not in output.err
    text = json.loads(output.out)["text"] if as_json else output.words
    assert text == " ".join(f"w{token}" for token in OWN[:5])
    if not as_json:
        assert "aborted" in output.err


@pytest.mark.usefixtures("loaded")
def test_hasty_ctrl_c_tears_no_output(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several signals in the middle of a round: it ends, is printed once, and statistics follow."""
    step, calls = Engine.step, []

    def interrupted(self: Engine) -> list[Event]:
        calls.append(self)
        if len(calls) == 3:
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    output = cli("generate", PROMPT, "--tree", "chain:3")
    assert signal.getsignal(signal.SIGINT) is before
    assert output.code == 130
    assert TEXT.startswith(output.words)
    assert len(output.words.split()) > 5
    assert "aborted" in output.err
    assert len(calls) == 3


@pytest.mark.usefixtures("loaded")
def test_the_line_of_a_text_ends_before_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine.step, []

    def failing(self: Engine) -> list[Event]:
        calls.append(self)
        if len(calls) == 3:
            raise InputError("It fails.")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    output = cli("generate", PROMPT, "--tree", "chain:3")
    assert output.code == 2
    assert output.words
    assert output.out.endswith("\n")


def test_a_second_ctrl_c_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaspec_core.cli.terminal.interrupts.PATIENCE_S", 0.0)
    with deferred_interrupts() as interrupts:
        assert not interrupts
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_names_of_the_package_load_when_they_are_used() -> None:
    code = """
import sys, moaspec
assert "torch" not in sys.modules
assert moaspec.generate and moaspec.Chain(2) and moaspec.load_target and moaspec.model
assert not hasattr(moaspec, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)


def test_version(cli: Cli) -> None:
    assert cli("--version").words == f"moaspec {moaspec.__version__}"


def test_code_in_a_repository_is_never_run(tmp_path: Path, cli: Cli) -> None:
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zzz", "auto_map": auto}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    output = cli("generate", "Hi", "--model", str(tmp_path))
    assert (output.code, output.out) == (2, "")
    assert "custom code" in output.err
    assert not (tmp_path / "ran").exists()


def test_ctrl_c_while_loading(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Target:
        raise KeyboardInterrupt

    load_targets_by(monkeypatch, interrupted)
    output = cli("generate", PROMPT)
    assert output.code == 130
    assert "Traceback" not in output.err


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tree", "bush"), "draft shape"),
        (("--tree", "tree:3,2,1"), "depth 3"),
        (("--threads", "0"), "--threads"),
        (("--threads", "1000000"), "--threads"),
        (("--max-new-tokens", "-1"), "--max-new-tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--stop", ""), "stop"),
    ],
)
def test_bad_input_is_one_line(options: tuple[str, ...], message: str, cli: Cli) -> None:
    output = cli("generate", PROMPT, *options)
    assert output.code == 2
    assert output.out == ""
    assert message in " ".join(output.err.split())
    assert output.err.startswith("Error: ")
    assert "Traceback" not in output.err


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 300, "[/x]", "[/x]/y", __file__])
@pytest.mark.parametrize("command", ["target", "drafter", "info"])
def test_names_that_are_none(command: str, name: str, cli: Cli, tmp_path: Path) -> None:
    """Some are too long for a path, some look like what a console would take for its markup."""
    tiny.model().save_pretrained(tmp_path)
    options = {
        "target": ("generate", PROMPT, "--model", name),
        "drafter": ("generate", PROMPT, "--model", str(tmp_path), "--drafter", name),
        "info": ("info", name),
    }
    output = cli(*options[command])
    assert output.code == 2
    assert name in output.err
    assert output.error.count("\n") == 1


def test_a_directory_that_looks_like_markup(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path / "[x" / "]")
    monkeypatch.chdir(tmp_path)
    output = cli("info", "[x/]")
    assert output.code == 0
    assert "[x/]" in output.out


def test_what_is_printed_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console.out.print("[bold]:fire:[/bold] [/]")
    assert capsys.readouterr().out == "[bold]:fire:[/bold] [/]\n"


@pytest.mark.slow
def test_what_cannot_be_written_has_no_traceback(
    cli: Cli, loaded: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "file" / "cache"))
    output = cli("calibrate")
    assert loaded.tokenizer is not None
    assert output.code == 2
    assert "$MOASPEC_CACHE" in output.err
    assert "Traceback" not in output.err


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_an_interrupted_calibration_keeps_the_turns_before(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, advance: Any, **options: Any) -> CostTable:
        turns = []

        def count(part: str) -> None:
            turns.append(part)
            advance(part)
            if len(turns) == 2:
                signal.raise_signal(signal.SIGINT)

        return calibrate(*arguments, advance=count, **options)

    monkeypatch.setattr("moaspec.calibration.measure_costs.calibrate", interrupted)
    output = cli("calibrate", "--json")
    assert output.code == 130
    assert json.loads(output.out)["pass_s"]
    assert "Stopped" in output.err
    assert list((cache_dir() / "calibration").iterdir())


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("options", [(), ("--raw",)])
def test_a_prompt_that_is_no_text(options: tuple[str, ...], cli: Cli) -> None:
    """What Python makes of arguments that are not UTF-8."""
    output = cli("generate", "w5 \udcff", *options)
    assert output.code == 2
    assert "UTF-8" in output.err


@pytest.mark.usefixtures("loaded")
def test_an_empty_prompt(cli: Cli) -> None:
    output = cli("generate", "  ")
    assert output.code == 2
    assert "prompt is empty" in output.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["moaspec", "--debug", "generate", "x", "--tree", "bush"])
    with pytest.raises(ShapeError):
        run()


def test_unknown_models_and_drafters(cli: Cli, tmp_path: Path) -> None:
    output = cli("generate", PROMPT, "--model", str(tmp_path))
    assert output.code == 2
    assert "Cannot load the target" in " ".join(output.err.split())
    tiny.model().save_pretrained(tmp_path)
    output = cli("generate", PROMPT, "--model", str(tmp_path), "--drafter", "not a name!")
    assert output.code == 2
    assert "No drafter" in output.err


def test_errors_of_the_system_have_no_number(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    config = tmp_path / "config.json"
    said = cli("info", str(tmp_path)).err
    assert f"Cannot read {config}: {config} is a directory, and must be a file" in said


def test_errors_are_not_wrapped(cli: Cli, tmp_path: Path) -> None:
    """Whoever reads them from a pipe has no terminal of 80 columns."""
    output = cli("generate", PROMPT, "--model", str(tmp_path))
    assert len(output.error) > 100
    assert output.error.count("\n") == 1


def test_damaged_targets_and_drafters(cli: Cli, tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    tiny.model().save_pretrained(target)
    save_drafter(tiny.random_drafter(tiny.target()), drafter)
    tensors = load_file(drafter / "model.safetensors")
    save_file({}, drafter / "model.safetensors")
    arguments = ("generate", PROMPT, "--model", str(target), "--drafter", str(drafter))
    output = cli(*arguments)
    assert output.code == 2
    assert "Tensors are missing in the checkpoint" in output.err
    assert "threads" not in output.err  # the target was not loaded
    save_file(tensors, drafter / "model.safetensors")
    save_file(tensors, target / "model.safetensors")
    output = cli(*arguments)
    assert output.code == 2
    assert f"{target} is damaged" in output.err
    assert output.error.count("\n") == 1


def test_a_target_without_tokenizer_or_drafter(cli: Cli, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    output = cli("generate", PROMPT, "--model", str(tmp_path))
    assert output.code == 2
    assert "no tokenizer" in output.err
    assert "decoding plainly" in " ".join(output.err.split())


def test_a_chat_template_is_used_unless_raw(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    target = text_target()
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template = "w7 {{ messages[0]['content'] }} w8"
    load_targets_by(monkeypatch, lambda *_, **__: target)
    options = ("--drafter", "none", "--json", "--max-new-tokens", "2")
    assert json.loads(cli("generate", PROMPT, *options).out)["prompt_tokens"] == 5
    assert json.loads(cli("generate", PROMPT, "--raw", *options).out)["prompt_tokens"] == 3


# train


def training_files(directory: Path) -> Path:
    tiny.model().save_pretrained(directory / "target")
    texts = zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)
    rows = [json.dumps({"prompt_ids": p, "response_ids": t}) for p, t in texts]
    (directory / "data.jsonl").write_text("\n".join(rows))
    config = directory / "config.yaml"
    config.write_text(
        f"target: {directory / 'target'}\n"
        f"data: [{directory / 'data.jsonl'}]\n"
        f"output: {directory / 'run'}\n"
        "held_out: 1\nbatch_size: 2\nsteps: 3\nwarmup_steps: 1\nsave_every: 2\n"
    )
    return config


@pytest.mark.slow
def test_train_resumes_and_its_drafter_generates(cli: Cli, tmp_path: Path) -> None:
    config = str(training_files(tmp_path))
    output = cli("train", config, "--steps", "2", "threads", "=", "1")
    assert output.code == 0
    assert "from step 0" in output.err
    assert "held-out accuracy" in output.err
    assert output.words.startswith("Finished: drafter written to ")
    again = cli("train", config)
    assert again.code == 0
    assert "from step 2" in again.err
    drafter = str(tmp_path / "run" / "drafter")
    assert json.loads(cli("info", drafter, "--json").out)["training"]["steps"] == 3
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    model = ("--model", str(tmp_path / "target"), "--dtype", "float32")
    info = cli("generate", PROMPT, *model, "--json")
    assert json.loads(info.out)["token_ids"][:24] == list(OWN)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("stps=3",), "did you mean steps?"),
        (("steps",), "key=value"),
        (("data=nowhere",), "nowhere"),
        (("--dryrun",), "There is no option --dryrun"),
        (("--batchsize", "3"), "did you mean batch_size?"),
    ],
)
def test_train_refuses(overrides: tuple[str, ...], message: str, cli: Cli, tmp_path: Path) -> None:
    output = cli("train", str(training_files(tmp_path)), *overrides)
    assert output.code == 2
    assert message in output.err
    assert "Traceback" not in output.err


def test_train_refuses_an_output_among_its_data(cli: Cli, tmp_path: Path) -> None:
    """A resumed run read its own log as data."""
    output = cli("train", str(training_files(tmp_path)), f"data=[{tmp_path}]")
    assert (output.code, (tmp_path / "run").exists()) == (2, False)
    assert f"run is inside {tmp_path}" in output.error


def test_a_failed_training_exits_with_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TrainingError("The loss became nan.")

    monkeypatch.setattr("moaspec_train.trainer.Trainer.train_step", fail)
    output = cli("train", str(training_files(tmp_path)))
    assert output.code == 1
    assert "The loss became nan." in output.err


# check


@pytest.fixture
def one_prompt(tmp_path: Path) -> Path:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"turns": [PROMPT]}))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_check_passes_and_says_so(one_prompt: Path, cli: Cli) -> None:
    """In one line: rows are for texts that differ."""
    output = cli("check", "--suite", str(one_prompt), "--max-new-tokens", "4")
    assert output.code == 0
    assert output.words.startswith("Right (")
    assert "every token is the target's choice" in output.words
    assert "moa, auto" not in output.words


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_a_thorough_check_has_every_method(one_prompt: Path, cli: Cli) -> None:
    options = ("check", "--suite", str(one_prompt), "--max-new-tokens", "4", "--json")
    short, thorough = (json.loads(cli(*options, *more).out) for more in ((), ("--thorough",)))
    methods = [{finding["method"] for finding in one["findings"]} for one in (short, thorough)]
    assert methods[0] < methods[1]
    assert {"hf", "plain", "moa, auto"} <= methods[0]
    assert {"moa (N=0), tree", "lookup, chain", "random, tree"} <= methods[1]


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_check_fails_where_there_is_a_fault(
    one_prompt: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaspec.engine.accept.walk", lambda tree, _: [0] if tree.tokens else [])
    options = ("check", "--suite", str(one_prompt), "--max-new-tokens", "4")
    output = cli(*options)
    assert output.code == 1
    assert "FAULT: greedy; replay, tree; alone; prompt 0, token" in output.words
    info = json.loads(cli(*options, "--json").out)
    assert info["right"] is False
    assert {"different", "identical"} <= {finding["kind"] for finding in info["findings"]}


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("found", [0, 3])
def test_an_interrupted_check_shows_what_was_found(
    found: int, one_prompt: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Check.run

    def interrupted(self: Check, told: Told) -> Iterator[CheckedText]:
        yield from islice(run(self, told), found)
        raise KeyboardInterrupt

    monkeypatch.setattr(Check, "run", interrupted)
    output = cli("check", "--suite", str(one_prompt), "--max-new-tokens", "2", "--json")
    assert output.code == 130
    info = json.loads(output.out)
    assert len(info["findings"]) == found
    assert not info["complete"]
    assert f"Stopped: {found} of " in output.err


@pytest.mark.parametrize("option", ["--limit", "--max-new-tokens", "--seeds"])
def test_check_with_nothing_to_do(option: str, cli: Cli) -> None:
    assert cli("check", option, "0").code == 2
    assert cli("check", "--alone", "-1").code == 2


@pytest.mark.usefixtures("loaded")
def test_no_tokens_have_no_speed(cli: Cli) -> None:
    output = cli("generate", PROMPT, "--max-new-tokens", "0")
    assert output.code == 0
    assert "0 tokens (max_new_tokens), 0 rounds" in output.err


def test_train_tells_its_phases_and_what_comes_of_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaspec.backends.linear_backends._bf16_instructions", lambda: False)
    config = str(training_files(tmp_path))
    output = cli("train", config, "steps=2", "sizes.draft_vocab=60", "mixed_precision=bf16")
    assert output.code == 0
    told = output.err
    phases = (
        "Loading ",
        "This CPU has neither AVX512-BF16 nor AMX",
        "Reading examples",
        "Preparing a drafter from 4 examples",
        "Warm start: SA",
        "tokens, fewer than sizes.draft_vocab=60",
        "The drafter will work with: ",
        "It will not work with moaspec checkpoint convert: ",
        "from step 0",
        "Measuring 1 held-out conversations",
        "held-out accuracy",
    )
    places = [told.index(phase) for phase in phases]
    assert places == sorted(places)
    assert told.index("Reading examples") < told.rindex("Loading ")  # the target, which takes long


def test_train_names_the_best_step(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter((2.5, 1.5))
    monkeypatch.setattr("moaspec_train.trainer.held_out_score", lambda _: next(scores))
    output = cli("train", str(training_files(tmp_path)))
    assert output.code == 0
    assert "The weights of step 2, the best on held-out text (2.50), are in" in output.err
    assert (tmp_path / "run" / "best" / "config.json").is_file()


@pytest.mark.slow
def test_a_hybrid_is_planned_and_trained(cli: Cli, tmp_path: Path) -> None:
    config = str(training_files(tmp_path))
    shutil.rmtree(tmp_path / "target")
    hybrid_models.model("lfm2").save_pretrained(tmp_path / "target")
    planned = cli("train", config, "--dry-run")
    assert planned.code == 0
    assert "num_hidden_layers is 4 in the checkpoint and 1 in the target" in planned.words
    done = cli("train", config, "steps=2")
    assert done.code == 0
    assert done.words.startswith("Finished: drafter written to ")


def test_sigterm_ends_any_command_in_order(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped container leaves no temporary files behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def load(*_: Any, **__: Any) -> None:
        with TemporaryDirectory(dir=scratch):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("moaspec.backends.load.load_target", load)
    output = cli("generate", PROMPT)
    assert (output.code, "Traceback" in output.err) == (143, False)
    assert list(scratch.iterdir()) == []


NOTHING = "Nothing was saved in"
PHASES = {
    "moaspec_train.dataset.read_examples.read_examples": NOTHING,
    "moaspec.backends.load.load_target": NOTHING,
    "moaspec_train.students.warm_start.fit_output": NOTHING,
    "moaspec_train.trainer.Trainer.export": "The last saved state, step-2",
}


@pytest.mark.parametrize("cause", ["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("place", PHASES)
def test_train_says_in_every_phase_what_is_saved(
    place: str, cause: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        if cause == "Ctrl-C":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(place, stop)
    output = cli("train", str(training_files(tmp_path)), "steps=2", "save_every=1", "held_out=0")
    assert output.code == (130 if cause == "Ctrl-C" else 143)
    assert f"Stopped by {cause}. {PHASES[place]}" in output.err
    assert output.err.count("Stopped") == 1
    kept = "Activations that were computed are kept." in output.err
    assert kept == place.endswith(("fit_output", "export"))
    assert "Run the same command again" in output.err


@pytest.mark.parametrize(
    "words",
    [
        ("generate", PROMPT),
        ("calibrate",),
        ("check", "--limit", "1"),
        ("eval", "--limit", "1"),
        ("data", "synth", "--out", "rows.jsonl"),
    ],
    ids=lambda words: words[0],
)
def test_ctrl_c_while_a_target_is_loaded(
    words: tuple[str, ...], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    load_targets_by(monkeypatch, stop)
    output = cli(*words)
    assert (output.code, "Traceback" in output.err) == (130, False)
    assert output.err.endswith("Stopped by Ctrl-C.\n")


def test_sigterm_in_steps_has_its_own_code(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate(step: Any) -> str:
        if step.step == 1:  # a second signal would act at once
            signal.raise_signal(signal.SIGTERM)
        return ""

    monkeypatch.setattr("moaspec_train.cli.train._line", terminate)
    output = cli("train", str(training_files(tmp_path)), "held_out=0")
    assert output.code == 143
    assert "Stopped after step 2 of 3, which is saved" in output.err


@pytest.mark.slow
def test_train_stops_in_time_and_goes_on(cli: Cli, tmp_path: Path) -> None:
    config = str(training_files(tmp_path))
    output = cli("train", config, "steps=2", "--for", "0.001s")
    assert output.code == 75
    assert "run it again to continue" in output.err
    again = cli("train", config, "steps=2", "--for", "1h")
    assert again.code == 0
    assert "from step 1" in again.err
    assert "run it again" not in again.err


@pytest.mark.slow
@pytest.mark.parametrize("text", ["soon", "0", "-1m", "3 days", ""])
def test_train_refuses_odd_durations(text: str, cli: Cli, tmp_path: Path) -> None:
    output = cli("train", str(training_files(tmp_path)), f"--for={text}")
    assert output.code == 2
    assert "8m" in output.err


# checkpoint


def saved_target(directory: Path) -> tuple[str, str]:
    """Write a target and its drafter, `ours`; options that name the target."""
    target = tiny.fresh_target(num_attention_heads=4, hidden_size=64)
    target.model.save_pretrained(directory / "target")
    (directory / "target" / "model.safetensors").unlink()  # only its config is read
    save_drafter(tiny.random_drafter(target, lsa_heads=4), directory / "ours")
    return "--model", str(directory / "target")


@pytest.mark.parametrize("form", ["raw", "vllm"])
def test_convert_there_and_back(form: str, cli: Cli, tmp_path: Path) -> None:
    model = saved_target(tmp_path)
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert (
        cli("checkpoint", "convert", str(tmp_path / "ours"), there, "--to", form, *model).code == 0
    )
    info = json.loads(cli("info", there, "--json").out)
    assert info["format"] == "published"
    output = cli(
        "checkpoint", "convert", there, back, "--to", "moaspec", *model, "--num-target-layers", "1"
    )
    assert output.code == 0
    assert json.loads(cli("info", back, "--json").out)["num_target_layers"] == [1]
    assert cli("checkpoint", "convert", back, back, "--to", form, *model).code == 2
    # What has no effect is refused: ours records N, the published forms do not.
    for source, to, n, reason in (
        (back, "moaspec", "1", "records its N"),
        (there, form, "1", "no effect"),
        (there, "moaspec", "99", "within 0..3"),
    ):
        out, number = str(tmp_path / "out"), ("--num-target-layers", n)
        output = cli("checkpoint", "convert", source, out, "--to", to, *model, *number)
        assert (output.code, Path(out).exists()) == (2, False)
        assert reason in output.error


def test_convert_replaces_a_drafter_and_no_other_model(cli: Cli, tmp_path: Path) -> None:
    """It removed the weights of the model there."""
    (tmp_path / "out").mkdir()
    weights = tmp_path / "out" / "model-00001-of-00002.safetensors"
    weights.write_text("weights")
    model, source = saved_target(tmp_path), str(tmp_path / "ours")
    output = cli("checkpoint", "convert", source, str(weights.parent), "--to", "moaspec", *model)
    assert output.code == 2
    assert "holds another model" in output.error
    assert list(weights.parent.iterdir()) == [weights]
    again = tmp_path / "again"
    (again / ".git").mkdir(parents=True)
    for _ in range(2):
        output = cli("checkpoint", "convert", source, str(again), "--to", "moaspec", *model)
        assert output.code == 0, output.error


def test_a_pushed_card_names_its_repository(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, mine = dict[str, bytes](), tmp_path / "mine"

    def commit(_: Any, repository: str, operations: list[Any], **__: Any) -> Any:
        assert repository == "someone/drafter"
        for one in operations:
            with one.as_file() as file:
                added[one.path_in_repo] = file.read()
        return SimpleNamespace(commit_url="here")

    for name in ("model_info", "create_repo"):
        monkeypatch.setattr(HfApi, name, lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "create_commit", commit)
    save_drafter(tiny.random_drafter(tiny.target()), mine, shard_bytes=100_000)
    (mine / "README.md").write_text("moaspec serve --drafter DIRECTORY")
    (mine / "notes.txt").write_text("mine")
    assert cli("checkpoint", "push", str(mine), "someone/drafter").code == 0
    assert added.pop("README.md") == b"moaspec serve --drafter someone/drafter"
    kept = {file.name: file.read_bytes() for file in mine.iterdir()}
    assert added == {name: kept[name] for name in kept if name not in ("README.md", "notes.txt")}
    assert len(added) > 3


def test_push_offline(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 9 of this machine is nobody's: a hub out of reach."""
    monkeypatch.setattr(
        "huggingface_hub.HfApi",
        lambda: HfApi(endpoint="http://127.0.0.1:9", token="none"),
    )
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: pytest.fail("it is tried for long"))
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path)
    output = cli("checkpoint", "push", str(tmp_path), "someone/drafter")
    assert output.code == 1
    assert "Is the hub in reach" in output.err
    assert cli("checkpoint", "push", str(tmp_path), "not an id").code == 2
    assert cli("checkpoint", "push", str(tmp_path / "nothing"), "someone/drafter").code == 2
