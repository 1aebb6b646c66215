"""Stop strings: across tokens, inside rounds, never in rejected branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import moaspec
import moaspec.generation.api
import tiny
from moaspec import Chain, Tree
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import TextProposer
from moaspec_core.errors import InputError
from moaspec_core.sampling.stop_strings import StopStrings, stop_strings

pytestmark = pytest.mark.kernels

PROMPT, OWN = tiny.PROMPTS[0], tiny.own_texts("llama")[0]
TARGET = tiny.fresh_target(tokenizer=tiny.tokenizer())


def word(token: int) -> str:
    return f"w{token}"


class Scripted(TextProposer):
    """Proposes one given chain of tokens after a text of a given length."""

    def __init__(self, at: int, chain: Sequence[int]) -> None:
        self.at, self.chain = at, tuple(chain)

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        chain = self.chain[: shape.depth] if len(token_ids) == self.at else ()
        return DraftTree(chain, tuple(range(-1, len(chain) - 1)))


def stopped(stop: str | Sequence[str], **options: Any) -> moaspec.GenerationResult:
    return moaspec.generate(TARGET, PROMPT, stop=stop, max_new_tokens=tiny.NEW_TOKENS, **options)


@pytest.mark.parametrize("end", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("first", [0, 1])
def test_the_text_ends_where_plain_decoding_ends_it(end: int, first: int) -> None:
    """The string begins inside one token and ends inside another, anywhere in a round."""
    stop = word(OWN[end - 1])[first:] + " " + word(OWN[end])
    plain = stopped(stop)
    assert plain.token_ids == list(OWN[: end + 1])
    assert (plain.stop_reason, plain.stop_string) == ("stop_string", stop)
    replay = moaspec.OracleProposer([[*PROMPT, *OWN]])
    for shape in (Chain(3), Tree(4, 2, 8), Chain(7)):
        drafted = stopped(stop, drafter=replay, tree=shape)
        assert drafted.token_ids == plain.token_ids
        assert len(drafted.sources) == end + 1
        assert sum(drafted.accept_lengths) == end
        assert drafted.stop_string == stop


def test_a_stop_string_that_spans_a_rejected_branch() -> None:
    """Its beginning is accepted, its end drafted and rejected: it never was in the text."""
    wrong = next(token for token in range(tiny.VOCAB) if token not in OWN)
    chain = [OWN[2], OWN[3], wrong, OWN[5]]
    drafter = Scripted(len(PROMPT) + 2, chain)
    stop = f"{word(OWN[3])} {word(wrong)}"
    result = stopped(stop, drafter=drafter, tree=Chain(4))
    assert result.accept_lengths[1] == 3
    assert tuple(result.token_ids) == OWN
    assert result.stop_reason == "max_new_tokens"
    assert result.stop_string is None


def test_the_prompt_is_not_searched() -> None:
    stop = f"{word(PROMPT[-1])} {word(OWN[0])}"
    assert tuple(stopped(stop).token_ids) == OWN


def test_of_several_strings_the_earliest_in_the_text_counts() -> None:
    later, earlier = word(OWN[4]), f"{word(OWN[2])} {word(OWN[3])}"
    result = stopped([later, earlier])
    assert result.stop_string == earlier
    assert result.token_ids == list(OWN[:4])


def test_a_stop_token_comes_before_a_stop_string() -> None:
    result = stopped(word(OWN[3]), stop_token_ids=[OWN[3]])
    assert (result.stop_reason, result.stop_string) == ("stop_token", None)


def test_one_token_may_complete_two_strings() -> None:
    watcher = StopStrings(("4", "w4"), tiny.tokenizer())
    assert watcher.push(3) is None
    assert watcher.push(4) in ("4", "w4")


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], [None], 5, b"a"], ids=repr)
def test_strings_that_are_none(stop: Any) -> None:
    with pytest.raises(InputError, match="non-empty strings"):
        stop_strings(stop)


def test_half_characters_in_strings() -> None:
    with pytest.raises(InputError, match="surrogate"):
        stop_strings(["end", "\ud83d"])
    assert stop_strings("\U0001f600") == ("\U0001f600",)


def test_none_is_no_stop_string() -> None:
    assert stop_strings(None) == ()
    assert moaspec.generate(tiny.target(), PROMPT, stop=None, max_new_tokens=2).stop_string is None


class Automaton:
    """Allows a text's own next token, and fails where the text has ended."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = tuple(text)

    def __call__(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        assert tuple(prefix) == self.text[: len(prefix)]
        assert len(prefix) < len(self.text), "asked behind the end"
        allowed = torch.tensor([self.text[len(prefix)]])
        return torch.full_like(logits_V, -torch.inf).index_fill(0, allowed, 0.0)


@pytest.mark.parametrize("end", range(1, 9))
@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_nothing_is_chosen_behind_the_end(name: str, end: int) -> None:
    """A custom processor is not asked what follows a draft that ends the text."""
    value = word(OWN[end]) if name == "stop" else OWN[end]
    options: dict[str, Any] = {name: [value], "max_new_tokens": tiny.NEW_TOKENS}
    own = moaspec.generate(TARGET, PROMPT, **options).token_ids
    for shape in (Chain(3), Tree(4, 2, 8), Chain(7)):
        result = moaspec.generate(
            TARGET,
            PROMPT,
            drafter=moaspec.OracleProposer([[*PROMPT, *OWN]]),
            tree=shape,
            logits_processors=[Automaton([*PROMPT, *own])],
            **options,
        )
        assert result.token_ids == own
        assert result.stop_reason in ("stop_string", "stop_token")


def test_nodes_that_complete_a_stop_string() -> None:
    """In either branch, by themselves or with what stands before; not below one that does."""
    watcher = StopStrings(("w4 w5", "w9"), tiny.tokenizer())
    assert watcher.push(4) is None
    tree = DraftTree(tokens=(5, 6, 4, 9, 5, 9, 5), parents=(-1, -1, 1, 0, 2, 2, 1))
    assert watcher.completing(tree.tokens, tree.parents) == {0, 4, 5}
    assert watcher.push(5) == "w4 w5"


@pytest.mark.parametrize(("name", "value"), [("stop", word(OWN[3])), ("stop_token_ids", OWN[3])])
def test_iterators_are_read_for_every_row(name: str, value: Any) -> None:
    """Whatever is iterable may be given, also what can be iterated over only once."""
    lists: dict[str, Any] = {name: [value]}
    expected = moaspec.generate(TARGET, PROMPT, max_new_tokens=8, **lists)
    assert expected.stop_reason in ("stop_string", "stop_token")
    iterators: dict[str, Any] = {name: iter([value])}
    (results,) = moaspec.generation.api.choices(
        TARGET, [PROMPT], max_new_tokens=8, num_choices=2, **iterators
    )
    assert [result.token_ids for result in results] == [expected.token_ids] * 2


def test_a_target_without_tokenizer() -> None:
    with pytest.raises(InputError, match="stop_token_ids"):
        moaspec.generate(tiny.target(), PROMPT, stop="x")
