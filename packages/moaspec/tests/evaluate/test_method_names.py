"""Names of methods, and what each decodes with."""

from __future__ import annotations

import pytest

import tiny
from moaspec.evaluate.method_names import KINDS, MethodResources, needed_checkpoints, parse_methods
from moaspec.evaluate.methods import Method, ReplayMethod, TransformersMethod
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError

REPEATING = [3, 1, 4, 1, 5, 3, 1, 4]
NEW_TOKENS = 16


def parts() -> MethodResources:
    drafter = tiny.agreeing_drafter("llama")
    checkpoints = {
        "moa": drafter,
        "eagle": tiny.ReplayDrafting([]),
        "independent": tiny.ReplayDrafting([]),
        "hf-assisted": tiny.fresh_target(seed=3),
    }
    return MethodResources(target=tiny.target(), checkpoints=checkpoints)


def method(name: str) -> Method:
    (made,) = parse_methods([name], parts())
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_writes_the_targets_text(kind: str) -> None:
    for prompt in (tiny.PROMPTS[0], REPEATING):
        run = method(kind).run(prompt, NEW_TOKENS)
        assert run.token_ids == tiny.own_text(tiny.target(), prompt, NEW_TOKENS)
        assert run.seconds > 0
        assert run.cpu_s > 0
        assert 0 < run.result.timing.prefill_s <= run.seconds


def test_free_branches_follow_a_plus() -> None:
    assert (method("moa").shape, method("moa").free_branches) == ("auto", "auto")
    assert (method("moa@auto+copy").shape, method("moa@auto+copy").free_branches) == ("auto", True)
    assert method("lookup+copy").free_branches is True
    assert method("moa:n1@chain:4+nocopy").num_target_layers == 1
    assert method("moa:n1@chain:4+nocopy").free_branches is False
    assert needed_checkpoints(["moa+copy"]) == {"moa"}


def test_settings_and_shapes() -> None:
    assert method("moa:n1@tree:3x2x5").num_target_layers == 1
    assert method("moa:n1@tree:3x2x5").shape == Tree(3, 2, 5)
    assert method("moa").num_target_layers is None
    assert isinstance(method("lookup@chain:4").drafter, NgramProposer)
    replay = method("replay:0.25@chain:4")
    assert isinstance(replay, ReplayMethod)
    assert (replay.agreement, replay.shape) == (0.25, Chain(4))


@pytest.mark.parametrize(
    ("agreement", "tau"), [("0", 1.0), ("1", NEW_TOKENS - 1)], ids=["never", "always"]
)
def test_replay_has_the_agreement_it_is_told(agreement: str, tau: float) -> None:
    run = method(f"replay:{agreement}@chain:{NEW_TOKENS}").run(tiny.PROMPTS[1], NEW_TOKENS)
    assert run.result.tau == tau


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "Unknown method"),
        ("plain:2", "Unknown method"),
        ("hf-lookup@chain:2", "Unknown method"),
        ("lookup:3", "Unknown method"),
        ("plain+copy", "Unknown method"),
        ("moa+", "after the plus"),
        ("moa+paste", "after the plus"),
        ("moa:1", "n0 to n3"),
        ("moa:n4", "n0 to n3"),
        ("moa:nx", "n0 to n3"),
        ("replay:1.5", "0..1"),
        ("replay:often", "0..1"),
        ("moa@chain:0", "depth"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        method(name)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.checkpoint])
def test_a_missing_checkpoint_is_named(kind: str) -> None:
    assert needed_checkpoints(["plain", f"{kind}"]) == {kind}
    with pytest.raises(InputError, match=f"'{kind}' needs a checkpoint.*--"):
        parse_methods([kind], MethodResources(target=tiny.target()))


def test_the_stock_target_is_loaded_once_and_only_where_needed() -> None:
    loads: list[None] = []

    def stock() -> Target:
        loads.append(None)
        return tiny.target()

    parse_methods(["plain", "lookup"], MethodResources(target=tiny.target(), stock=stock))
    assert not loads
    made = parse_methods(["hf", "hf-lookup"], MethodResources(target=tiny.target(), stock=stock))
    assert len(loads) == 1
    assert all(isinstance(one, TransformersMethod) for one in made)


def test_prompts_decoded_together() -> None:
    prompts = [tiny.PROMPTS[0], REPEATING, tiny.PROMPTS[2]]
    for name in ("plain", "lookup@chain:3", "moa@tree:2x2x4", "replay:0.7@chain:3"):
        runs = method(name).run_many(prompts, NEW_TOKENS)
        own = [tiny.own_text(tiny.target(), prompt, NEW_TOKENS) for prompt in prompts]
        assert [run.token_ids for run in runs] == own
        assert len({run.seconds for run in runs}) == 1
