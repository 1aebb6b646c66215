from moaspec.evaluate.check import Check, Finding
from moaspec.evaluate.equality import Equality, judge
from moaspec.evaluate.methods import Method, Run
from moaspec.evaluate.prompts import Prompt, read_prompts
from moaspec.evaluate.report import Outcome, Report
from moaspec.evaluate.runner import Settings, measure
from moaspec.evaluate.store import Item, Sample, Store
from moaspec.evaluate.table import Parts, needed_checkpoints, parse_methods

__all__ = [
    "Check",
    "Equality",
    "Finding",
    "Item",
    "Method",
    "Outcome",
    "Parts",
    "Prompt",
    "Report",
    "Run",
    "Sample",
    "Settings",
    "Store",
    "judge",
    "measure",
    "needed_checkpoints",
    "parse_methods",
    "read_prompts",
]
