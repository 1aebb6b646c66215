"""The files of deploy/serve: options, paths and settings that exist."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from moaspec_core.cli.main import app

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "deploy/serve"


def parse(command: list[str]) -> None:
    """Refuses options of `moaspec serve` that do not exist."""
    name, *arguments = command
    found: Any = typer.main.get_command(app)
    serve = found.commands[name]
    context = type(typer.Context(serve))(serve)
    serve.make_parser(context).parse_args(args=arguments)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(SERVE / "moaspec.service")
    return parser


def test_the_container_installs_what_exists_and_starts_the_server() -> None:
    text = (SERVE / "Containerfile").read_text("utf-8")
    for place in re.findall(r"/opt/moaspec/((?:packages|drafters)/[\w.-]+)", text):
        assert (ROOT / place / "pyproject.toml").exists()
    started = re.search(r"ENTRYPOINT \[(.*)\]", text)
    assert started is not None
    program, *command = [part.strip(' "') for part in started[1].split(",")]
    assert program == "moaspec"
    parse(command)
    # Nothing is asked of the index before PyTorch's build for CPUs, and nothing runs as root.
    asked = re.findall(r"pip install .*", text)
    assert asked[0].endswith("--index-url https://download.pytorch.org/whl/cpu")
    assert text.index("USER moaspec") < text.index("ENTRYPOINT")


def test_the_unit_starts_the_server() -> None:
    service = unit()["Service"]
    program, *command = shlex.split(service["ExecStart"])
    assert program.endswith("/.venv/bin/moaspec")
    parse(command)
    assert service["Environment"].partition("=")[2] == f"/var/cache/{service['CacheDirectory']}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_knows_all_settings_of_the_unit(tmp_path: Path) -> None:
    text = (SERVE / "moaspec.service").read_text("utf-8")
    copy = tmp_path / "moaspec.service"
    copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text))
    said = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert not [line for line in said.stderr.splitlines() if "moaspec.service" in line]


def test_the_proxy_passes_streams_on_and_sends_a_name_that_the_server_knows() -> None:
    text = (SERVE / "nginx.conf").read_text("utf-8")
    settings = [line for line in text.splitlines() if not line.strip().startswith("#")]
    joined = "\n".join(settings)
    assert "proxy_buffering off;" in joined
    assert "proxy_set_header Host" not in joined
    assert joined.count("{") == joined.count("}")
    assert all(line.strip().endswith((";", "{", "}")) for line in settings if line.strip())
    port = unit()["Service"]["ExecStart"].rpartition(" ")[2]
    assert set(re.findall(r"proxy_pass http://127\.0\.0\.1:(\d+);", joined)) == {port}
