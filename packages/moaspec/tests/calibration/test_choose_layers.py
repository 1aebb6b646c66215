"""Which N a drafter drafts with, and that it never changes the text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import moaspec
import tiny
from costs import know, rated, table, watch_reused
from moaspec.calibration.choose_layers import best_option, layers_options
from moaspec.generation.shaping import shaping_for
from moaspec.model.moa import MoADrafter
from moaspec_core.policy.cost_model import PRIOR, CostTable

Store = Callable[[dict[int, CostTable]], None]

CHEAP = table()
DEAR = table(root_s=0.003, step_s=(0.003, 0.003))
"""Drafts through two of the target's layers, three times as dear."""
BETTER, HARDLY = 0.8, 0.42
"""Rates of the dearer N that pay, and that do not, beside `RATE` of the cheaper one."""
RATE = 0.4


def drafter(*rates: float, exits: tuple[int, ...] = (0, 2)) -> MoADrafter:
    return rated(tiny.target(), *rates, exits=exits)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Lets a machine be known by hand-written tables, by N."""
    return partial(know, monkeypatch)


@pytest.fixture
def reused(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    return watch_reused(monkeypatch)


def layers(module: MoADrafter, **options: Any) -> int | None:
    """The N that is decoded with."""
    return shaping_for(tiny.target(), module, **options).num_target_layers


@pytest.mark.parametrize(
    ("rate", "dear", "expected"),
    [
        pytest.param(BETTER, DEAR, 2, id="much better drafts pay"),
        pytest.param(HARDLY, DEAR, 0, id="hardly better ones do not"),
        pytest.param(HARDLY, CHEAP, 2, id="unless they are as cheap"),
        pytest.param(RATE, CHEAP, 0, id="of equals the default"),
    ],
)
def test_the_exit_that_promises_most_tokens_a_second(
    rate: float, dear: CostTable, expected: int, store: Store
) -> None:
    store({0: CHEAP, 2: dear})
    assert layers(drafter(RATE, rate)) == expected


def test_costs_and_rates_are_the_chosen_exits(store: Store) -> None:
    store({0: CHEAP, 2: DEAR})
    shaping = shaping_for(tiny.target(), drafter(RATE, BETTER))
    assert shaping.costs == DEAR
    assert shaping.prior == ((BETTER,),)
    assert not shaping.lags  # reused layers need every token's features
    assert shaping_for(tiny.target(), drafter(RATE, HARDLY)).lags


def test_the_default_need_not_be_the_smallest(store: Store) -> None:
    store({0: CHEAP, 2: DEAR})
    assert layers(drafter(HARDLY, RATE, exits=(2, 0))) == 0
    assert layers(drafter(BETTER, RATE, exits=(2, 0))) == 2


@pytest.mark.parametrize(
    ("rates", "tables"),
    [
        ((RATE, BETTER), {}),
        ((RATE, BETTER), {0: CHEAP}),
        ((RATE, BETTER), {2: CHEAP}),
        ((RATE,), {0: DEAR, 2: CHEAP}),
        ((), {0: DEAR, 2: CHEAP}),
    ],
    ids=["no table", "default's alone", "other's alone", "first exit's rates alone", "no rates"],
)
def test_what_is_not_known_is_not_chosen(
    rates: tuple[float, ...], tables: dict[int, CostTable], store: Store
) -> None:
    """So drafters of before, which record the first exit's rates at most, draft as before."""
    store(tables)
    shaping = shaping_for(tiny.target(), drafter(*rates))
    assert shaping.num_target_layers == 0
    assert shaping.costs == tables.get(0)
    assert shaping.prior == (((rates[0],),) if rates else PRIOR)


def test_an_unknown_exit_among_others(store: Store) -> None:
    store({0: DEAR, 2: DEAR})
    assert layers(drafter(RATE, BETTER, BETTER, exits=(0, 1, 2))) == 2


@pytest.mark.parametrize(("named", "rate"), [(0, BETTER), (2, HARDLY)])
def test_who_names_an_n_gets_it(named: int, rate: float, store: Store) -> None:
    tables = {0: CHEAP, 2: DEAR}
    store(tables)
    module = drafter(RATE, rate)
    assert layers(module) != named
    shaping = shaping_for(tiny.target(), module, num_target_layers=named)
    assert (shaping.num_target_layers, shaping.costs) == (named, tables[named])


def test_who_names_a_shape_gets_the_default(store: Store) -> None:
    store({0: CHEAP, 2: DEAR})
    assert layers(drafter(RATE, BETTER), tree="chain:2") is None
    assert layers(drafter(RATE, BETTER), tree="chain:2", num_target_layers=2) == 2


@pytest.mark.parametrize("rates", [(), (RATE,)])
def test_a_single_exit_is_always_taken(rates: tuple[float, ...], store: Store) -> None:
    store({2: DEAR})
    module = drafter(*rates, exits=(2,))
    (only,) = layers_options(tiny.target(), module)
    assert best_option([only]) is only
    assert only.costs == DEAR
    # One that was trained for another N is taken at the rates that are known of it.
    (other,) = layers_options(tiny.target(), module, num_target_layers=1)
    assert other.prior == only.prior == (((RATE,),) if rates else PRIOR)
    assert not other.recorded


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("rate", "expected"), [(BETTER, {2}), (HARDLY, set())])
def test_the_text_stays_whichever_exit_is_chosen(
    temperature: float, rate: float, expected: set[int], store: Store, reused: set[int]
) -> None:
    store({0: CHEAP, 2: DEAR})
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    plain = moaspec.generate(tiny.target(), tiny.PROMPTS, **options)
    drafted = moaspec.generate(tiny.target(), tiny.PROMPTS, drafter=drafter(RATE, rate), **options)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert any(one.num_drafted for one in drafted)
    assert reused == expected


def by_session(module: MoADrafter, prompt: tuple[int, ...]) -> list[int]:
    session = moaspec.Session(tiny.target(), module)
    first = session.generate(prompt, max_new_tokens=tiny.NEW_TOKENS)
    # Whatever shape a turn asks for, the session's N stays.
    session.generate(prompt, max_new_tokens=tiny.NEW_TOKENS, tree="chain:2")
    return first.token_ids


def by_transformers(module: MoADrafter, prompt: tuple[int, ...]) -> list[int]:
    ids_1T = torch.tensor([list(prompt)])
    output = tiny.target().model.generate(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=tiny.NEW_TOKENS,
        do_sample=False,
        custom_generate=moaspec.custom_generate(module),
    )
    return [int(token) for token in output[0, len(prompt) :]]


@pytest.mark.parametrize(("rate", "expected"), [(BETTER, {2}), (HARDLY, set())])
@pytest.mark.parametrize("way", [by_session, by_transformers])
def test_everybody_who_decodes_takes_the_same_exit(
    way: Callable[[MoADrafter, tuple[int, ...]], list[int]],
    rate: float,
    expected: set[int],
    store: Store,
    reused: set[int],
) -> None:
    store({0: CHEAP, 2: DEAR})
    assert tuple(way(drafter(RATE, rate), tiny.PROMPTS[0])) == tiny.own_texts("llama")[0]
    assert reused == expected
