"""Print docs/python-api.md, made from the signatures and docstrings of the public API."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

SECTIONS = {
    "Load and generate": (
        "moaspec.load_target",
        "moaspec.load_drafter",
        "moaspec.generate",
        "moaspec.stream",
        "moaspec.Session",
        "moaspec.custom_generate",
    ),
    "Results and settings": (
        "moaspec.GenerationResult",
        "moaspec.Event",
        "moaspec.SamplingParams",
        "moaspec.TokenRules",
        "moaspec.Chain",
        "moaspec.Tree",
    ),
    "Other drafters": (
        "moaspec.ModelProposer",
        "moaspec.NgramProposer",
        "moaspec.OracleProposer",
    ),
    "Extend": (
        "moaspec.Target",
        "moaspec.Engine",
        "moaspec_core.drafting.protocols.Proposer",
        "moaspec.model.moa.MoADrafter",
    ),
    "Client-server": (
        "moaspec_edge.device.remote_session.RemoteSession",
        "moaspec_edge.device.remote_session.RemoteOptions",
        "moaspec_edge.device.events.RemoteEvent",
    ),
    "Training settings": (
        "moaspec_train.run_config.TrainConfig",
        "moaspec_train.students.drafter_sizes.DrafterSizes",
        "moaspec_train.students.losses.LossWeights",
    ),
    "Errors": ("moaspec_core.errors",),
}

HEAD = """# Python API

Generated from the docstrings by `make docs`. [Decoding](decoding.md) and
[client-server](remote.md#from-python) have examples.
"""


def reference() -> str:
    """The text of docs/python-api.md."""
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name) for name in names]
    return "\n".join(parts).rstrip()


def _entry(name: str) -> str:
    thing = resolve_name(name)
    if isinstance(thing, ModuleType):
        return "\n".join([*_paragraphs(thing), _classes(thing), ""])
    lines = [f"### {name}\n", "```python", _signature(thing), "```\n", *_paragraphs(thing)]
    methods = list(_methods(thing)) if inspect.isclass(thing) else []
    return "\n".join([*lines, *methods, *([""] if methods else [])])


def _classes(module: ModuleType) -> str:
    own = [
        one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    return "\n".join(
        f"- `{one.__name__}({', '.join(base.__name__ for base in one.__bases__)})`: {_first(one)}"
        for one in own
        if inspect.isclass(one)
    )


def _methods(owner: type) -> Iterator[str]:
    for name, member in _public(owner):
        if isinstance(member, property):
            yield f"- `{name}`: {_first(member)}"
        elif inspect.isfunction(member):
            yield f"- `{_signature(member, short=True)}`: {_first(member)}"


def _public(owner: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties with a docstring, those of our base classes too."""
    found: dict[str, Any] = {}
    for each in owner.__mro__:
        if each.__module__.startswith("moaspec"):
            found = {**vars(each), **found}
    for name, member in found.items():
        if not name.startswith("_") and getattr(member, "__doc__", None):
            yield name, member


def _signature(thing: Any, *, short: bool = False) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    result = ""
    if isinstance(node, ast.ClassDef):
        arguments, name = _fields(node) or _of_init(node), f"class {node.name}"
    else:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments, name = _arguments(node), node.name
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if short:
        return f"{name}({', '.join(one for one in arguments if one != 'self')})"
    inside = "".join(f"    {argument},\n" for argument in arguments if argument != "self")
    return f"{name}(\n{inside}){result}" if inside else f"{name}(){result}"


def _fields(node: ast.ClassDef) -> list[str]:
    """Fields of a dataclass or named tuple, as its arguments."""
    plain = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return []
    for one in plain:  # a call that declares more than a default, which is its first argument
        if isinstance(one.value, ast.Call) and one.value.args:
            one.value = one.value.args[0]
    return [ast.unparse(one) for one in plain if "ClassVar" not in ast.unparse(one.annotation)]


def _of_init(node: ast.ClassDef) -> list[str]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return _arguments(one)
    return []


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """As in the source; commas within brackets separate nothing."""
    return re.split(r", (?![^\[\](){}]*[\])}])", ast.unparse(node.args))


def _first(thing: Any) -> str:
    """The first sentence or paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _paragraphs(thing: Any) -> list[str]:
    """A docstring as Markdown: its sections become lists."""
    return [_section(part) for part in (inspect.getdoc(thing) or "").split("\n\n")]


def _section(part: str) -> str:
    title, _, rest = part.partition("\n")
    if not re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields|Source):", title):
        if part.startswith(("```", "    ", ">>>")) or re.search(r"\n {2,}", part):
            return f"```text\n{part}\n```\n"
        return f"{' '.join(part.split())}\n"
    lines = textwrap.dedent(rest).splitlines()
    if title in ("Returns:", "Yields:", "Source:"):
        return f"{title} {' '.join(line.strip() for line in lines)}\n"
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(re.sub(r"^(\*{0,2}\w+)(?=[: (])", r"`\1`", line))
    return f"{title}\n\n" + "".join(f"- {item}\n" for item in items)


if __name__ == "__main__":
    print(reference())
