from moaspec.evaluate.correctness.check_target import Check, CheckedText
from moaspec.evaluate.correctness.equality import Equality, judge
from moaspec.evaluate.method_names import MethodResources, needed_checkpoints, parse_methods
from moaspec.evaluate.methods import Method, MethodRun
from moaspec.evaluate.prompt_suites import Prompt, read_prompts
from moaspec.evaluate.report.report import Outcome, Report
from moaspec.evaluate.results_store import PromptTurn, ResultsStore, Sample
from moaspec.evaluate.runner import EvalSettings, measure

__all__ = [
    "Check",
    "CheckedText",
    "Equality",
    "EvalSettings",
    "Method",
    "MethodResources",
    "MethodRun",
    "Outcome",
    "Prompt",
    "PromptTurn",
    "Report",
    "ResultsStore",
    "Sample",
    "judge",
    "measure",
    "needed_checkpoints",
    "parse_methods",
    "read_prompts",
]
