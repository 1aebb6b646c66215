from moaspec.evaluate.correctness.check_target import Check, Finding
from moaspec.evaluate.correctness.equality import Equality, judge
from moaspec.evaluate.method_names import MethodParts, needed_checkpoints, parse_methods
from moaspec.evaluate.methods import Method, MethodRun
from moaspec.evaluate.prompt_suites import Prompt, read_prompts
from moaspec.evaluate.report.report import Outcome, Report
from moaspec.evaluate.results_store import Item, Sample, Store
from moaspec.evaluate.runner import Settings, measure

__all__ = [
    "Check",
    "Equality",
    "Finding",
    "Item",
    "Method",
    "MethodParts",
    "MethodRun",
    "Outcome",
    "Prompt",
    "Report",
    "Sample",
    "Settings",
    "Store",
    "judge",
    "measure",
    "needed_checkpoints",
    "parse_methods",
    "read_prompts",
]
