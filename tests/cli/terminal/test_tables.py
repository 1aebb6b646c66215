"""Reports as tables: the data."""

from __future__ import annotations

import io

import pytest

import tiny
from edge_bench.command import _cuts_table
from moaspec.cli.loading import num_threads
from moaspec.cli.report_tables import methods_costs_table, methods_table, parts_table
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.report.report import Report
from moaspec.evaluate.runner import EvalSettings, measure
from moaspec_core.cli.terminal.console import Screen
from moaspec_core.cli.terminal.table import rendered


@pytest.fixture(scope="module")
def report() -> Report:
    parts = MethodResources(
        target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")}
    )
    prompts = [Prompt(f"suite {i}", "0", (str(i),)) for i in range(2)]
    methods = parse_methods(("plain", "moa@tree:2x2x4"), parts)
    return measure(
        methods, prompts, lambda *_: list(tiny.PROMPTS[0]), EvalSettings(max_new_tokens=5)
    )


def test_numbers_of_a_column_are_of_the_kind_that_its_heading_says(report: Report) -> None:
    columns = {heading: cells for heading, *cells in methods_table(report.as_json()).columns}
    plain, moa = report.outcomes
    assert columns["method"] == ["plain", "moa@tree:2x2x4"]
    assert plain.tokens_per_s is not None
    assert moa.tokens_per_s is not None
    speeds = [f"{one:.1f}" for one in (plain.tokens_per_s, moa.tokens_per_s)]
    assert columns["tokens/s (total)"] == speeds
    total = f"{moa.tokens_per_s / plain.tokens_per_s:.2f}x"
    assert columns["speed-up over plain (total)"] == ["1.00x", total]
    median = report.speedup(moa)
    assert columns["speed-up over plain (median)"] == ["1.00x", f"{median:.2f}x"]
    assert columns["same text as plain"] == ["2 of 2", "2 of 2"]


def test_costs_have_a_row_per_timed_method(report: Report) -> None:
    assert [row[0] for row in methods_costs_table(report.as_json()).rows] == [
        "plain",
        "moa@tree:2x2x4",
    ]


def test_cuts_of_links_are_one_table_at_80_columns() -> None:
    found = dict.fromkeys(("noticed_s", "next_s", "back_s", "back_limit_s"), 12.346)
    found |= dict.fromkeys(("before_per_s", "after_per_s"), 123.4) | {"agreement": 0.75}
    cut = {**found, "alone": [1] * 24, "kept": 24, "same_text": False}
    shown = Screen(file=io.StringIO(), width=80, soft_wrap=True)
    shown.print(rendered(_cuts_table({"links": {"lan": [cut], "none": [cut]}}), 80))
    assert isinstance(shown.file, io.StringIO)
    lines = shown.file.getvalue().splitlines()
    assert sum("differs" in line and "12.35" in line for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_tau_is_told_by_suite(report: Report) -> None:
    table = parts_table(report.as_json())
    assert table.headings == ("tau by suite", "plain", "moa@tree:2x2x4")
    assert [row[0] for row in table.rows] == ["suite 0", "suite 1"]
    assert not parts_table({"methods": {}}).rows


def test_one_thread_is_singular() -> None:
    assert [num_threads(1), num_threads(2, "CPU ")] == ["1 thread", "2 CPU threads"]
