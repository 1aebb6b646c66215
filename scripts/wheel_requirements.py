"""Print what a wheel requires on this machine, except some packages.

python wheel_requirements.py WHEEL --without torch torchvision
"""

from __future__ import annotations

import argparse
import zipfile
from email.parser import HeaderParser

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main() -> None:
    """One requirement per line, as pip's `--requirement` reads them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("wheel")
    options.add_argument("--without", nargs="*", default=[])
    args = options.parse_args()
    without = {canonicalize_name(name) for name in args.without}
    for requirement in requirements(args.wheel):
        if canonicalize_name(requirement.name) not in without:
            print(f"{requirement.name}{_extras(requirement)}{requirement.specifier}")


def requirements(wheel: str) -> list[Requirement]:
    """Those whose markers hold here, without any extra."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    main()
