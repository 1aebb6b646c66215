"""What `moaspec eval` does with --cost and --cut; `moaspec.cli.evaluate` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from eval_studies.accuracy import is_correct, require_graders
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from eval_studies.cut_quality import CutQuality
    from eval_studies.pass_costs import PassCosts
    from moaspec.evaluate.methods import Method
    from moaspec.evaluate.prompt_suites import Prompt
    from moaspec.evaluate.runner import Encode


@dataclass(frozen=True)
class CostStudy:
    """Measures costs of passes and rounds."""

    file_name = "costs.json"

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Do nothing: prompts are not used."""

    def measure(
        self, methods: Sequence[Method], prompts: Sequence[Prompt], encode: Encode
    ) -> PassCosts:
        """Measure the methods without prompts."""
        del prompts, encode
        from eval_studies.pass_costs import measure_costs, num_measurements

        with ProgressBar("measuring costs", num_measurements(methods)) as bar:
            return measure_costs(methods, advance=bar.advance)

    def show(self, found: PassCosts) -> None:
        """Print tables."""
        from eval_studies.study_tables import show_costs

        show_costs(found)


@dataclass(frozen=True)
class CutStudy:
    """Measures the texts that drafters write without the target."""

    cut: int  # tokens before the cut
    max_new_tokens: int  # of the whole text
    accuracy: bool  # whether answers are graded
    file_name = "cut.json"

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse what cannot be measured, before anything is loaded.

        Raises:
            InputError: no tokens before the cut or after it, or no grader for these prompts here.
        """
        if self.accuracy:
            require_graders(prompts)
        if not 1 <= self.cut < self.max_new_tokens:
            raise InputError(
                f"--cut must be at least 1 and below --max-new-tokens ({self.max_new_tokens}), got "
                f"{self.cut}."
            )

    def measure(
        self, methods: Sequence[Method], prompts: Sequence[Prompt], encode: Encode
    ) -> CutQuality:
        """Measure the methods on the first turns of the prompts."""
        from eval_studies.cut_quality import measure_cut

        tokenizer = cast(Any, methods[0].target.tokenizer)

        def right(prompt: Prompt, answer: Sequence[int]) -> bool | None:
            text = tokenizer.decode(answer, skip_special_tokens=True)
            return is_correct(prompt, text)

        with ProgressBar("measuring", len(prompts)) as bar:
            return measure_cut(
                methods,
                prompts,
                lambda turn: encode([turn], []),
                after=self.cut,
                max_new_tokens=self.max_new_tokens,
                is_correct=right if self.accuracy else lambda *_: None,
                advance=bar.advance,
            )

    def show(self, found: CutQuality) -> None:
        """Print a table."""
        from eval_studies.study_tables import show_cut

        show_cut(found)
