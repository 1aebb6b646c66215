"""Is it faster here, and is it exactly right?"""

from moaspec.evaluate.check import Check, Finding
from moaspec.evaluate.equality import Equality, compare
from moaspec.evaluate.methods import Method, Run, parse_methods
from moaspec.evaluate.prompts import Prompt, read_prompts
from moaspec.evaluate.runner import Outcome, Report, measure

__all__ = [
    "Check",
    "Equality",
    "Finding",
    "Method",
    "Outcome",
    "Prompt",
    "Report",
    "Run",
    "compare",
    "measure",
    "parse_methods",
    "read_prompts",
]
