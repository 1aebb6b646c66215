"""Prompts about code, made from the source of permissively licensed packages.

Example: python lab/code_prompts.py --out prompts.jsonl --limit 60000 --also train_prompts.jsonl

Each line has `source`, `licence` and `messages`; empty assistant messages are turns that
`moaspec data regenerate` lets the target write. Sources are the standard library, installed Python
distributions and, with --node, packages of a node_modules directory, all under licences that
PERMISSIVE names. The order is random by --seed, near-duplicates are left out. Compare the output
with the evaluation sets before training: `moaspec data overlap prompts.jsonl --against SUITES`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|0BSD|Unlicense|Zlib)\b", re.I
)
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EUPL|proprietary|NVIDIA)", re.I)
LANGUAGES = (
    *("JavaScript", "TypeScript", "Java", "C", "C++", "C#", "Go", "Rust", "Ruby", "PHP", "Kotlin"),
    *("Swift", "Lua", "Perl", "Haskell", "Scala", "R", "Julia", "Bash"),
)
FRAMES = (
    "{task}\n\n```{language}\n{code}\n```",
    "```{language}\n{code}\n```\n\n{task}",
    "{task}\n\n{code}",
)
TASKS = (
    "Explain what this {kind} does.",
    "Explain this code step by step.",
    "What does `{name}` return, and for which inputs does it fail?",
    "Write a docstring for `{name}`.",
    "Add comments to this code.",
    "Write unit tests for `{name}`.",
    "Write tests with edge cases for this {kind}.",
    "Refactor this {kind} so that it is easier to read.",
    "Make this code faster, and say why it is faster.",
    "Review this code. Name problems and show a better version.",
    "Rename the variables of `{name}` to clearer names and show the whole code.",
    "Add error handling to this {kind}.",
    "Add logging to this {kind}.",
    "Rewrite this in {other}.",
    "Translate this {kind} to {other}.",
    "What is the time complexity of `{name}`?",
    "Give an example of how to call `{name}`.",
    "Summarise this code in two sentences.",
    "Add a parameter `verbose` to `{name}` that prints what happens. Return the full code.",
)
PYTHON_TASKS = (
    "Add type hints to this {kind}.",
    "Convert `{name}` to an async function.",
    "Rewrite this {kind} in a more Pythonic way.",
)
FOLLOW_UPS = (
    "Now write tests for it.",
    "Can you make it shorter?",
    "Add type annotations and a docstring.",
    "Explain your answer line by line.",
    "What happens if the input is empty?",
    "Show how to use it in a small program.",
    "Rewrite it in {other}.",
    "Are there any bugs left?",
)
QUESTIONS = (
    "How do I {thing} in {language}?",
    "Write a {language} function to {thing}.",
    "Show a short {language} program to {thing}, and explain it.",
    "What is the best way to {thing} in {language}?",
    "Write a {language} class to {thing}, with an example of its use.",
)
THINGS = (
    *(
        "reverse a linked list",
        "sort a list of dictionaries by a key",
        "read a CSV file",
        "parse JSON",
    ),
    *(
        "count the words of a text",
        "find duplicates in an array",
        "implement a stack",
        "implement a queue",
    ),
    *(
        "check if a string is a palindrome",
        "compute the n-th Fibonacci number",
        "merge two sorted arrays",
    ),
    *(
        "send an HTTP request",
        "build a small REST API",
        "connect to a SQLite database",
        "flatten a nested list",
    ),
    *(
        "validate an email address",
        "generate a random password",
        "walk a directory tree",
        "zip files",
    ),
    *(
        "implement binary search",
        "implement quicksort",
        "traverse a binary tree in order",
        "balance brackets",
    ),
    *(
        "find the shortest path in a graph",
        "cache the results of a function",
        "format a date",
        "parse a date",
    ),
    *(
        "convert Roman numerals to integers",
        "compute a factorial",
        "multiply two matrices",
        "find prime numbers",
    ),
    *(
        "download a file with progress",
        "resize an image",
        "hash a password",
        "read environment variables",
    ),
    *(
        "run tasks in parallel",
        "write a producer and a consumer",
        "limit the rate of calls",
        "retry a failing call",
    ),
    *(
        "parse command-line arguments",
        "write to a log file",
        "compare two files",
        "split a string by several separators",
    ),
    *(
        "remove whitespace from a string",
        "compute the mean and median of numbers",
        "find the longest word",
    ),
    *(
        "convert a decimal number to binary",
        "compute the greatest common divisor",
        "solve the towers of Hanoi",
    ),
    *(
        "implement a hash map",
        "implement a trie",
        "implement an LRU cache",
        "implement a priority queue",
    ),
    *(
        "compute the edit distance of two strings",
        "find all permutations of a list",
        "solve a Sudoku",
    ),
    *(
        "play tic-tac-toe",
        "simulate a bank account",
        "convert temperatures",
        "draw a triangle of stars",
    ),
    *(
        "count vowels",
        "check for anagrams",
        "rotate an array",
        "transpose a matrix",
        "find the second largest number",
    ),
    *(
        "group items by a property",
        "debounce a function",
        "deep copy an object",
        "escape HTML",
        "encode base64",
    ),
)
WRONG = (
    ("<=", "<"),
    (">=", ">"),
    ("==", "!="),
    (" and ", " or "),
    (" + ", " - "),
    ("True", "False"),
    ("not in", "in"),
    ("[0]", "[1]"),
    ("+ 1", "- 1"),
    ("is None", "is not None"),
)
MIN_LINES, MAX_LINES, MAX_FILE_CHARACTERS, PER_PACKAGE = 5, 70, 12_000, 3_000
SHINGLE, MAX_OVERLAP, COMMON = 5, 0.5, 20
SHORT = 16  # words of a text that only an equal one repeats


@dataclass(frozen=True)
class Code:
    """A function, class or file of one package."""

    package: str
    licence: str
    language: str
    kind: str
    name: str
    text: str


Row = dict[str, Any]
Make = Callable[[Code, random.Random], list[str] | None]


def licence_of(distribution: Distribution) -> str | None:
    """The licence of a distribution, if it is permissive."""
    data: Any = distribution.metadata
    names = [data.get("License-Expression") or "", *(data.get_all("Classifier") or [])]
    said = " ".join(one for one in names if "::" not in one or one.startswith("License"))
    if not said.strip():
        said = (data.get("License") or "")[:60]
    return said.strip() if PERMISSIVE.search(said) and not COPYLEFT.search(said) else None


def python_files() -> Iterator[tuple[str, str, Path]]:
    """(package, licence, file) of the standard library and of permissive distributions."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        if "site-packages" not in path.parts:
            yield "python", "PSF-2.0", path
    for distribution in distributions():
        licence = licence_of(distribution)
        for file in (distribution.files or ()) if licence else ():
            if file.suffix == ".py":
                yield distribution.metadata["Name"], str(licence), Path(str(file.locate()))


def python_code(root: Iterator[tuple[str, str, Path]]) -> Iterator[Code]:
    """Functions, classes and small files of Python sources."""
    for package, licence, path in root:
        if {"test", "tests", "_vendor", "idlelib"} & set(path.parts) or "_pb2" in path.name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        lines = text.splitlines()
        if 1_000 < len(text) < MAX_FILE_CHARACTERS:
            yield Code(package, licence, "python", "file", path.name, text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                end = node.end_lineno or node.lineno
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                if MIN_LINES <= end - node.lineno < MAX_LINES:
                    part = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
                    yield Code(package, licence, "python", kind, node.name, part)


_SCRIPT = re.compile(
    r"^(?:export )?(?:async )?(?:function\*? |class )(\w+)[^\n]*\{\n.*?^\}", re.M | re.S
)


def script_code(modules: Path) -> Iterator[Code]:
    """Functions and classes of JavaScript and TypeScript packages."""
    for manifest in modules.rglob("package.json"):
        try:
            info = json.loads(manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        licence = info.get("license")
        if not isinstance(licence, str) or not PERMISSIVE.search(licence) or "name" not in info:
            continue
        for path in manifest.parent.rglob("*.[cmtj]*s"):
            beneath = path.relative_to(manifest.parent)
            if path.suffix[1:] not in ("js", "mjs", "cjs", "ts") or "node_modules" in beneath.parts:
                continue
            if path.name.endswith((".d.ts", ".min.js")) or path.stat().st_size > 300_000:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            language = "typescript" if path.suffix == ".ts" else "javascript"
            for found in _SCRIPT.finditer(text):
                if (
                    MIN_LINES <= found[0].count("\n") < MAX_LINES
                    and len(max(found[0].splitlines(), key=len)) < 200
                ):
                    kind = "class" if "class " in found[0][:20] else "function"
                    yield Code(info["name"], licence, language, kind, found[1], found[0])


def ask(code: Code, draw: random.Random) -> list[str] | None:
    """One task about the code, sometimes with a further turn."""
    tasks = TASKS + (PYTHON_TASKS if code.language == "python" else ())
    other = draw.choice(LANGUAGES if code.language == "python" else ("Python", *LANGUAGES[2:]))
    task = draw.choice(tasks).format(kind=code.kind, name=code.name, other=other)
    frame = draw.choice(FRAMES)
    turns = [frame.format(task=task, language=code.language, code=code.text)]
    if draw.random() < 0.15:
        turns.append(draw.choice(FOLLOW_UPS).format(other=other))
    return turns


def finish(code: Code, draw: random.Random) -> list[str] | None:
    """The first lines of the code, to be completed."""
    lines = code.text.splitlines()
    cut = draw.randint(2, max(2, len(lines) * 2 // 3))
    task = draw.choice(
        ("Complete this {kind}.", "Finish `{name}`.", "Write the rest of this code.")
    )
    return [
        f"{task.format(kind=code.kind, name=code.name)}\n\n```{code.language}\n"
        + "\n".join(lines[:cut])
        + "\n```"
    ]


def mend(code: Code, draw: random.Random) -> list[str] | None:
    """The code with one mistake put in, to be mended."""
    fitting = [pair for pair in WRONG if pair[0] in code.text]
    if not fitting:
        return None
    right, wrong = draw.choice(fitting)
    places = [found.start() for found in re.finditer(re.escape(right), code.text)]
    at = draw.choice(places)
    text = code.text[:at] + wrong + code.text[at + len(right) :]
    task = draw.choice(
        (
            "This {kind} has a bug. Find it and fix it.",
            "`{name}` gives wrong results. Fix it and return the whole code.",
        )
    )
    return [f"{task.format(kind=code.kind, name=code.name)}\n\n```{code.language}\n{text}\n```"]


def describe(code: Code, _draw: random.Random) -> list[str] | None:
    """The signature and the docstring, to be implemented."""
    if code.kind != "function" or code.language != "python":
        return None
    try:
        node = ast.parse(code.text).body[0]
    except SyntaxError:  # a string of several lines kept the code from being dedented
        return None
    says = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
    if not says or not isinstance(node, ast.FunctionDef):
        return None
    arguments = ast.unparse(node.args)
    return [f"Implement `def {node.name}({arguments})` in Python:\n\n{says}"]


MAKERS: Mapping[Make, float] = {ask: 0.6, finish: 0.12, mend: 0.16, describe: 0.12}


def rows_of(code: Code, draw: random.Random) -> Row | None:
    """A random task about the code, as a row."""
    make = ask if code.kind == "file" else draw.choices(list(MAKERS), list(MAKERS.values()))[0]
    turns = make(code, draw)
    return None if turns is None else row(turns, f"{make.__name__}:{code.package}", code.licence)


def row(turns: list[str], source: str, licence: str) -> Row:
    """A conversation of these user turns, with empty answers between them."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    between = {"role": "assistant", "content": ""}
    joined = [one for message in messages for one in (message, between)][:-1]
    return {"source": source, "licence": licence, "messages": joined}


def questions(draw: random.Random) -> Iterator[Row]:
    """Short questions on programming."""
    for thing in THINGS:
        for language in ("Python", "Python 3", *LANGUAGES):
            asked = draw.choice(QUESTIONS).format(thing=thing, language=language)
            yield row([asked], "question:moaspec", "Apache-2.0")


def given(path: Path, sources: str) -> Iterator[Row]:
    """Prompts of a JSONL file with `source` and `prompt`, of the sources that a pattern names."""
    for line in path.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        if re.search(sources, prompt["source"]):
            yield row([prompt["prompt"]], prompt["source"], "MIT")


class NearDuplicates:
    """Refuses prompts that share more than half of their runs of five words with an earlier one."""

    def __init__(self) -> None:
        self._seen: dict[int, list[int]] = {}
        self._sizes: list[int] = []

    def is_new(self, text: str) -> bool:
        """Whether the text is new; it then counts as an earlier one."""
        words = re.findall(r"\w+", text.lower())
        size = SHINGLE if len(words) > SHORT else len(words)
        runs = {hash(tuple(words[i : i + size])) for i in range(max(1, len(words) - size + 1))}
        shared: dict[int, int] = {}
        for run in runs:
            # Runs that many prompts share belong to the tasks' wording.
            for number in self._seen.get(run, ()):
                shared[number] = shared.get(number, 0) + 1
        for number, count in shared.items():
            if count > MAX_OVERLAP * min(len(runs), self._sizes[number]):
                return False
        for run in runs:
            numbers = self._seen.setdefault(run, [])
            if len(numbers) < COMMON:
                numbers.append(len(self._sizes))
        self._sizes.append(len(runs))
        return True


def main() -> None:
    """Parse the command line and write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--limit", type=int, default=60_000, help="prompts at most")
    parser.add_argument(
        "--node", type=Path, action="append", default=[], help="node_modules directory"
    )
    parser.add_argument("--also", type=Path, help="JSONL file with source and prompt")
    parser.add_argument(
        "--sources", default="code", help="pattern of the sources taken from --also"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 - chance, no secrets
    codes = [*python_code(python_files()), *(c for path in options.node for c in script_code(path))]
    made = [one for code in codes if (one := rows_of(code, draw)) is not None]
    made += questions(draw)
    made += given(options.also, options.sources) if options.also else ()
    draw.shuffle(made)
    new, kept = NearDuplicates(), Counter[str]()
    with options.out.open("w", encoding="utf-8") as file:
        for one in made:
            package = str(one["source"]).rpartition(":")[2]
            text = " ".join(turn["content"] for turn in one["messages"])
            if kept.total() == options.limit:
                break
            if kept[package] < PER_PACKAGE and new.is_new(text):
                file.write(json.dumps(one, ensure_ascii=False) + "\n")
                kept[package] += 1
    print(f"{len(codes)} pieces of code, {len(made)} prompts, {kept.total()} written")


if __name__ == "__main__":
    main()
