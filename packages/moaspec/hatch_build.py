"""Compiles the kernels into wheels for Linux on x86-64, so that their users need no compiler.

One library for each instruction set; `moaspec/backends/cpu/build.py` chooses when it loads. Without
a compiler the wheel has none, and its users compile at the first use, as in a checkout.
"""

import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path("src/moaspec/backends/cpu")


class Kernels(BuildHookInterface[Any]):
    """Adds `moaspec/backends/cpu/compiled/NAME.so`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the installation is editable."""
        self._kept = tempfile.TemporaryDirectory()  # until the wheel is written
        self._scratch = Path(self._kept.name)
        fits = platform.system() == "Linux" and platform.machine() == "x86_64"
        if version == "editable" or not fits:
            return
        how = runpy.run_path(str(Path(self.root, HERE, "compiler_flags.py")))
        found = map(shutil.which, [os.environ.get("CXX", ""), *how["COMPILERS"]])
        compiler = next(filter(None, found), None)
        if compiler is None:
            self.app.display_warning("No C++ compiler: this wheel has no compiled kernels.")
            return
        running = {
            name: self._compile(compiler, (*how["FLAGS"], *flags), f"{name}.so")
            for name, flags in how["INSTRUCTIONS"].items()
        }
        for name, process in running.items():
            if process.wait() != 0:  # an old compiler does not know all instructions
                self.app.display_warning(f"{compiler} cannot compile the kernels for {name}.")
                continue
            made = self._scratch / f"{name}.so"
            content = made.read_bytes()
            # As `seal_file` of moaspec_core: a library that is cut short would kill the process.
            made.write_bytes(content + hashlib.sha256(content).digest())
            place = f"moaspec/backends/cpu/compiled/{name}.so"
            build_data["force_include"][str(made)] = place
            build_data["pure_python"] = False
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{system}"

    def _compile(self, compiler: str, flags: tuple[str, ...], name: str) -> subprocess.Popen[bytes]:
        source = Path(self.root, HERE, "cpp/kernels.cpp")
        return subprocess.Popen([compiler, *flags, str(source), "-o", str(self._scratch / name)])
