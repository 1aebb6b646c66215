"""Check the page's JavaScript libraries, or fetch other versions of them from npm.

python scripts/vendor.py                       # compares every file with its checksum
python scripts/vendor.py dompurify 3.4.18      # fetches that version and records it (needs npm)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent.parent / "packages/moaspec-serve/src/moaspec_serve/page/vendor"
RECORD = VENDOR / "vendor.json"


def main() -> None:
    """Check the recorded files, or fetch a version."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("name", nargs="?", help="package of npm, one that is recorded")
    options.add_argument("version", nargs="?")
    args = options.parse_args()
    packages: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    if args.name is None:
        wrong = differing(packages)
        raise SystemExit(f"Changed by hand: {', '.join(wrong)}." if wrong else 0)
    if args.name not in packages or args.version is None:
        options.error(f"give a name and a version; recorded are {', '.join(packages)}")
    fetch(args.name, args.version, packages[args.name])
    RECORD.write_text(json.dumps(packages, indent=2) + "\n", encoding="utf-8")


def differing(packages: dict[str, Any]) -> list[str]:
    """Files that are not what was recorded."""
    return [
        name
        for package in packages.values()
        for name, file in package["files"].items()
        if checksum(VENDOR / name) != file["sha256"]
    ]


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(name: str, version: str, package: dict[str, Any]) -> None:
    """Copy a package's files out of npm's archive, and record version, licence and checksums."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["npm", "pack", "--silent", "--pack-destination", directory, f"{name}@{version}"]
        subprocess.run(command, check=True)  # noqa: S603 - names come from the record
        with tarfile.open(next(Path(directory).glob("*.tgz"))) as archive:
            archive.extractall(directory, filter="data")
        unpacked = Path(directory) / "package"
        about = json.loads((unpacked / "package.json").read_text(encoding="utf-8"))
        package |= {"version": about["version"], "license": about["license"]}
        for to, file in package["files"].items():
            (VENDOR / to).write_bytes((unpacked / file["from"]).read_bytes())
            file["sha256"] = checksum(VENDOR / to)


if __name__ == "__main__":
    main()
