"""The grammar's processor is a function of the prefix."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

import serving
from moaspec.decode.grammar import Grammars
from moaspec.errors import InputError

SCHEMA: dict[str, Any] = {"enum": ["abc", "abd", 17]}


def grammars(stops: frozenset[int] = frozenset({serving.END})) -> Grammars:
    return Grammars(serving.tokenizer(), vocab_size=serving.VOCAB, stop_token_ids=stops)


def ids(text: str) -> list[int]:
    return list(serving.tokenizer()(text)["input_ids"])


def test_only_what_the_schema_allows() -> None:
    made = grammars()
    processor = made.processor(made.json_schema(SCHEMA), prompt_length=2)
    logits_V = torch.zeros(serving.VOCAB)

    def after(text: str) -> set[str]:
        allowed = torch.isfinite(processor((5, 6, *ids(text)), logits_V)).nonzero()[:, 0]
        names = serving.tokenizer().convert_ids_to_tokens(allowed.tolist())
        return set(names)

    assert after("") == {'"', "1"}
    assert after('"ab') == {"c", "d"}
    assert after("1") == {"7"}  # back to another branch
    assert after('"abd"') == {"<|end|>"}
    assert after('"a') == {"b"}  # a shorter prefix of an earlier one


def test_any_order_of_prefixes_gives_the_same() -> None:
    made = grammars()
    grammar = made.json_schema({"type": "array", "items": {"enum": [1, 12, "x"]}, "maxItems": 3})
    text = ids(json.dumps([12, "x", 1]))
    prefixes = [tuple(text[:end]) for end in range(len(text) + 1)]
    logits_V = torch.zeros(serving.VOCAB)
    fresh = {one: made.processor(grammar, 0)(one, logits_V) for one in prefixes}
    shared = made.processor(grammar, 0)
    for one in itertools.chain(prefixes, reversed(prefixes), prefixes[::3]):
        assert torch.equal(shared(one, logits_V), fresh[one])


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}]
)
def test_bad_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="schema cannot be used"):
        grammars().json_schema(schema)


def test_targets_without_an_end_have_no_grammar() -> None:
    with pytest.raises(InputError, match="no token that ends"):
        grammars(frozenset()).json_schema(SCHEMA)


def test_deep_schemas_do_not_end_the_process() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    try:
        grammars().json_schema(schema)
    except InputError as error:
        assert "schema" in str(error)  # noqa: PT017 - refusing is as good as compiling
