"""Packages whose names load when they are first used, because PyTorch takes seconds to import."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Make the imports of a package's `__init__.pyi` on demand.

    The stub says what the package exports, to type checkers and to this function alike. It holds
    lines `from module import name, ...`, where a module of the package itself may be a name too.

    Returns:
        `__getattr__` and `__all__` of the package.
    """
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
    lines = ast.parse(stub.read_text(encoding="utf-8")).body
    homes = {
        alias.name: str(line.module)
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, sorted(name for name, home in homes.items() if home != package)
