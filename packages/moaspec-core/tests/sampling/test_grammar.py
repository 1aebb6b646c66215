"""The grammar's processor is a function of the prefix."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import serving
from hostile_grammars import chained, grammars, rules, wide
from moaspec_core.errors import InputError
from moaspec_core.sampling import grammar, grammar_worker

SCHEMA: dict[str, Any] = {"enum": ["abc", "abd", 17]}


def ids(text: str) -> list[int]:
    return list(serving.tokenizer()(text)["input_ids"])


def test_only_what_the_schema_allows() -> None:
    made = grammars()
    processor = made.json_schema(SCHEMA).processor(prompt_length=2)
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
    fresh = {one: grammar.processor(0)(one, logits_V) for one in prefixes}
    shared = grammar.processor(0)
    for one in itertools.chain(prefixes, reversed(prefixes), prefixes[::3]):
        assert torch.equal(shared(one, logits_V), fresh[one])


def test_masks_along_drafts_are_those_of_each_prefix() -> None:
    """Up to a draft that the grammar forbids, after which nothing is chosen."""
    made = grammars()
    processor = made.json_schema(SCHEMA).processor(prompt_length=2)
    prompt, logits_V = (5, 6), torch.zeros(serving.VOCAB)
    for drafts, num_masks in ((ids('"abd"'), 6), (ids('"ax'), 3), ([], 1)):
        masks = pickle.loads(pickle.dumps(processor.along(prompt, drafts)))
        assert len(masks.bitmasks) == num_masks
        for end in range(num_masks):
            prefix = (*prompt, *drafts[:end])
            assert torch.equal(masks(prefix, logits_V), processor(prefix, logits_V))


STRICT: dict[str, dict[str, Any]] = {
    "optional strings": wide(1, 400)["anyOf"][0],
    "alternatives": wide(20, 30),
    "ranged integers": {
        "type": "object",
        "properties": {
            f"k{i}": {"type": "integer", "minimum": i, "maximum": 9 * i + 7} for i in range(800)
        },
        "additionalProperties": False,
    },
}


def allowed_after(processor: grammar.GrammarProcessor, text: str) -> set[str]:
    allowed = torch.isfinite(processor(ids(text), torch.zeros(serving.VOCAB))).nonzero()[:, 0]
    return set(serving.tokenizer().convert_ids_to_tokens(allowed.tolist()))


@pytest.mark.parametrize("name", STRICT)
def test_wide_strict_schemas_are_followed(name: str) -> None:
    processor = grammars().json_schema(STRICT[name]).processor(0)
    assert allowed_after(processor, "{") == {'"', "}"}
    assert allowed_after(processor, '{"') == {"k"}
    assert allowed_after(processor, "{}") == {"<|end|>"}


def test_a_text_ends_where_its_grammar_cannot_be_followed() -> None:
    """Nothing outside the schema is allowed, and shorter prefixes are as before."""
    made = grammars().json_schema(wide(70, 80))
    processor = made.processor(0)
    for _ in range(2):
        assert allowed_after(processor, "") == {"{"}
        assert allowed_after(processor, '{"') == {"<|end|>"}
    masks = processor.along((), ids('{"k'))
    assert len(masks.bitmasks) == 2
    with pytest.raises(InputError, match=r"items; max is 16000.*simpler"):
        made.check_ended([*ids('{"'), serving.END])


def test_a_text_ends_where_other_settings_forbid_all_that_its_grammar_allows() -> None:
    made = grammars().json_schema(SCHEMA)
    processor = made.processor(0)
    logits_V = torch.full((serving.VOCAB,), -torch.inf)
    logits_V[ids("x")] = 0.0
    masked_V = processor(ids('"'), logits_V)
    assert torch.isfinite(masked_V).nonzero().tolist() == [[serving.END]]
    made.check_ended([*ids('"abc"'), serving.END])
    with pytest.raises(InputError, match="before it is complete"):
        made.check_ended([*ids('"'), serving.END])


def test_a_trial_lets_servers_go_first() -> None:
    script = "import os; from grammar_worker import bound; bound(5, 1 << 34); print(os.nice(0))"
    told = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(grammar_worker.__file__).parent,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert int(told.stdout) == min(19, os.nice(0) + 19)


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}]
)
def test_bad_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"schema.* cannot be used"):
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


@pytest.mark.slow
def test_hostile_grammars_are_refused_and_end_nothing() -> None:
    """In a process of their own, so that a crash is a failed test and not the end of all tests."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import hostile_grammars as h; h.refused_all()"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 30, 60])
def test_chains_of_honest_length_compile(number: int) -> None:
    made = grammars()
    assert made.json_schema(chained(number))
    assert made.lark(rules(number))


def test_a_wide_schema_compiles() -> None:
    """Descriptions and properties count for nothing but their characters."""
    fields = {f"field_{i}": {"type": "string", "description": "a (:" * 20} for i in range(500)}
    assert grammars().json_schema({"type": "object", "properties": fields})


@pytest.mark.slow
def test_compiled_grammars_are_kept_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made = grammars()
    texts = [made.json_schema({"type": "string", "maxLength": i}).text for i in range(1, 5)]
    monkeypatch.setattr(grammar, "KEPT_CHARACTERS", len(texts[0]) + len(texts[1]))
    kept = [made.json_schema({"type": "string", "maxLength": i}).text for i in range(5, 8)]
    assert list(made._known) == kept[-2:]


def test_a_grammar_that_compiled_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = grammars()
    first = made.json_schema(SCHEMA)
    assert made.known(first.text) is first
    made._known.clear()  # as when many others have come since
    monkeypatch.setattr(subprocess, "run", None)
    made.compiled(first.text)


def test_a_mask_of_more_than_a_step_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place takes a fifth of a second; the text may only end, and that is an error."""
    made = grammars().json_schema(SCHEMA)
    now_s = itertools.count(0.0, 0.2)
    clock = SimpleNamespace(thread_time=lambda: next(now_s))
    monkeypatch.setattr("moaspec_core.sampling.grammar.time", clock)
    processor = made.processor(0)
    for text in ('"a', '"ab'):
        assert allowed_after(processor, text) == {"<|end|>"}
    with pytest.raises(InputError, match=r"within 0.15 s"):
        made.check_ended([*ids('"a'), serving.END])
