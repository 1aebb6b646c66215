"""Install each distribution from its wheel into an environment of its own, and run its README.

    python scripts/try_wheels.py                          all of them, about ten minutes
    python scripts/try_wheels.py --python python3.13 moaspec-core moaspec-edge

Environments have what the wheel asks for and nothing else: no compiler, no checkout, an empty
cache. A table says what each takes. It needs pip, an index, and disk for one
environment at a time: two gigabytes with PyTorch's build for CPUs, ten with the one for CUDA.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import install

PROJECTS = sorted([*install.ROOT.glob("packages/moaspec*"), *install.ROOT.glob("drafters/*")])
DRAFTER = "moaspec-drafter-smollm2-135m"
PORT = 50178
PIP_WHEEL = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
ASK = ["Why is the sky blue?"]
WITHOUT_TORCH = """
from importlib.util import find_spec
import moaspec_edge
assert not find_spec("torch")
"""
START_S = 300  # that a server may take


@dataclass(frozen=True)
class Case:
    """What is installed together, and the commands that must work."""

    wheels: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    needs_torch: bool = True
    needs_server: bool = False
    extras: dict[str, str] = field(default_factory=dict)


GENERATE = ("moaspec", "generate", *ASK, "--max-new-tokens", "8", "--threads", "1")
CASES = {
    "moaspec-core": Case(("moaspec-core",), (("moaspec", "--version"),), needs_torch=False),
    "moaspec": Case(("moaspec", DRAFTER), (("moaspec", "models"), GENERATE)),
    "moaspec-train": Case(
        ("moaspec-train", DRAFTER),
        (
            ("moaspec", "train", "--init", "smollm2-135m"),
            ("moaspec", "train", "smollm2-135m.yaml", "--dry-run"),
        ),
    ),
    "moaspec-serve": Case(
        ("moaspec-serve", "moaspec", DRAFTER), (("moaspec", "serve", "--help"), GENERATE)
    ),
    "moaspec-edge": Case(
        ("moaspec-edge",),
        (
            ("python", "-c", WITHOUT_TORCH),
            ("moaspec", "remote", *ASK, "--server", f"127.0.0.1:{PORT}", "--bundle", "{bundle}"),
        ),
        needs_torch=False,
        needs_server=True,
        extras={"moaspec-edge": "[onnx,private]"},
    ),
    "moaspec-vllm": Case(
        ("moaspec-vllm", DRAFTER),
        (("moaspec", "vllm-config", "smollm2-135m", "--model", "smollm2-135m"),),
    ),
}


def main() -> None:
    """Try the distributions that are named, or all."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    options.add_argument("--python", default=sys.executable, help="The Python of environments.")
    args = options.parse_args()
    unknown = set(args.names) - CASES.keys()
    if unknown:
        options.error(f"no distribution {', '.join(unknown)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="moaspec-wheels-") as scratch:
        place = Path(scratch)
        wheels = build(place / "wheels")
        rows = []
        for name in args.names or CASES:
            with server(place, wheels, args.python, wanted=CASES[name].needs_server):
                rows.append(try_case(name, CASES[name], place, wheels, args.python))
    print(f"{'distribution':<18}{'wheel MB':>10}{'packages':>10}{'installed MB':>14}  commands")
    for row in rows:
        print(row)


def build(directory: Path) -> dict[str, Path]:
    """A wheel of each distribution, by its name."""
    for project in PROJECTS:
        say(f"Building {project.name}")
        run([*PIP_WHEEL, "--wheel-dir", str(directory), str(project)])
    # A file's name has "_" for each "-" and "." of the distribution's.
    found = {path.name.split("-")[0]: path for path in directory.glob("*.whl")}
    return {project.name: found[re.sub(r"[-.]", "_", project.name)] for project in PROJECTS}


def environment(place: Path, wheels: dict[str, Path], case: Case, python: str) -> Path:
    """A new virtual environment with a case's wheels."""
    run([python, "-m", "venv", str(place)])
    pip = [str(place / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    if case.needs_torch:
        run([*pip, install.TORCH])
        run([*pip, "--no-deps", install.MODEL])
    asked = [f"{wheels[name]}{case.extras.get(name, '')}" for name in case.wheels]
    run([*pip, "--find-links", str(wheels["moaspec"].parent), *asked])
    return place / "bin"


def try_case(name: str, case: Case, place: Path, wheels: dict[str, Path], python: str) -> str:
    """Install and run a distribution; a line of the table."""
    say(f"Installing {name}")
    binaries = environment(place / name, wheels, case, python)
    for command in case.commands:
        say("  " + " ".join(command[:3]) + (" ..." if command[3:] else ""))
        words = [word.format(bundle=place / "bundle") for word in command]
        run([str(binaries / words[0]), *words[1:]], place, only=binaries)
    (packages,) = (place / name).glob("lib/python*/site-packages")
    installed = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    number = len(list(packages.glob("*.dist-info"))) - 1  # without pip
    shutil.rmtree(place / name)
    size = wheels[name].stat().st_size
    return (
        f"{name:<18}{size / 1e6:>10.2f}{number:>10}{installed / 1e6:>14.0f}  "
        f"{len(case.commands)} of {len(case.commands)} work"
    )


@contextmanager
def server(place: Path, wheels: dict[str, Path], python: str, *, wanted: bool) -> Iterator[None]:
    """A server on this machine, and a bundle for its devices, from an environment of its own."""
    if not wanted:
        yield
        return
    say("Installing a server for the device")
    extras = {"moaspec-edge": "[server,export]"}
    case = Case(("moaspec-edge", DRAFTER), (), extras=extras)
    binaries = environment(place / "server", wheels, case, python)
    moaspec = str(binaries / "moaspec")
    alias = "smollm2-135m"
    export = ["checkpoint", "export-device", alias, alias, str(place / "bundle")]
    run([moaspec, *export, "--format", "onnx"], place, only=binaries)
    command = [moaspec, "target-server", "--port", str(PORT), "--threads", "1"]
    process = subprocess.Popen(
        command, cwd=place, env=clean(place, binaries), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        started = time.monotonic()
        while '"address"' not in process.stdout.readline():
            if process.poll() is not None or time.monotonic() - started > START_S:
                sys.exit("The server does not start.")
        yield
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(place / "server")


def clean(place: Path, binaries: Path) -> dict[str, str]:
    """Variables of a user who has this environment and nothing else."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": str(binaries), "MOASPEC_CACHE": str(place / "cache")}


def run(command: Iterable[str], place: Path | None = None, *, only: Path | None = None) -> None:
    """Run a command; its output is shown where it fails, and ends everything."""
    words = list(command)
    env = None if place is None or only is None else clean(place, only)
    done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}failed: {done.returncode}")


def say(text: str) -> None:
    """Tell what is being done."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
