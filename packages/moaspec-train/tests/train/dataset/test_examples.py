"""Training examples: reading, batching, the trimmed vocabulary."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moaspec_core.errors import DataError
from moaspec_train.dataset import examples as examples_module
from moaspec_train.dataset.examples import Example, collate, epoch_batches, frequent_tokens
from moaspec_train.dataset.read_examples import read_examples

ROWS = [
    {"prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6]},
    {"prompt_ids": [7], "response_ids": [8, 9], "more": "is ignored"},
]
EXAMPLES = [Example((1, 2, 3), (4, 5, 6)), Example((7,), (8, 9))]


def read(*paths: Path, vocab_size: int = 10, max_length: int = 8) -> list[Example]:
    return read_examples(paths, vocab_size=vocab_size, max_length=max_length)


def lines(rows: Sequence[object]) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n\n"


def test_plain_and_compressed_files(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(lines(ROWS))
    with gzip.open(compressed, "wt") as file:
        file.write(lines(ROWS[:1]))
    assert read(plain) == EXAMPLES
    assert read(compressed) == EXAMPLES[:1]
    assert read(plain, compressed) == [*EXAMPLES, EXAMPLES[0]]
    assert len(EXAMPLES[0]) == 6


def test_long_responses_are_cut_and_long_prompts_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([*ROWS, {"prompt_ids": [1], "response_ids": [2]}]))
    assert read(path, max_length=5) == [Example((1, 2, 3), (4, 5)), EXAMPLES[1]]
    assert read(path, max_length=4) == [EXAMPLES[1]]


@pytest.mark.parametrize("prompt", [3, 4, 6, 10])
def test_a_prompt_beyond_max_length_is_left_out(prompt: int, tmp_path: Path) -> None:
    """A cut at a negative index would keep the response's beginning."""
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"prompt_ids": [1] * prompt, "response_ids": [2] * 9}]))
    with pytest.raises(DataError, match="too long"):
        read(path, max_length=3)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1, 2]",
        "3",
        '{"prompt_ids": [1]}',
        '{"prompt_ids": [1], "response_ids": 5}',
        '{"prompt_ids": null, "response_ids": [1, 2]}',
        '{"prompt_ids": [1], "response_ids": [2, 10]}',
        '{"prompt_ids": [-1], "response_ids": [2, 3]}',
        '{"prompt_ids": [1], "response_ids": [2.0, 3]}',
        '{"prompt_ids": "12", "response_ids": [2, 3]}',
        '{"prompt_ids": [true], "response_ids": [2, 3]}',
        '{"prompt_ids": [], "response_ids": [2, 3]}',
    ],
)
def test_malformed_lines_are_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n\n{line}\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:3"):
        read(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read(tmp_path / "nowhere.jsonl")
    (tmp_path / "fake.jsonl.gz").write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match="fake"):
        read(tmp_path / "fake.jsonl.gz")
    whole = gzip.compress(lines(ROWS * 50).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cut"):
        read(tmp_path / "cut.jsonl.gz")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt_ids": "\xff"}\n')
    with pytest.raises(DataError, match="latin"):
        read(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("content", ["", "\n\n", lines([{"prompt_ids": [1], "response_ids": []}])])
def test_nothing_usable(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="No usable"):
        read(path)


def test_collate_pads_on_the_right() -> None:
    batch = collate(EXAMPLES, [1, 0])
    assert batch.input_ids_BT.tolist() == [[7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert batch.response_BT.int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    assert batch.example_ids == (1, 0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 7), st.integers(0, 99))
def test_an_epoch_has_every_example_once(lengths: list[int], size: int, seed: int) -> None:
    examples = [Example((1,), (2,) * length) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    batches = epoch_batches(examples, batch_size=size, generator=generator)
    assert sorted(i for batch in batches for i in batch) == list(range(len(examples)))
    assert all(0 < len(batch) <= size for batch in batches)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 90))
def test_batches_by_tokens(lengths: list[int], tokens: int) -> None:
    examples = [Example((1,), (2,) * (length - 1)) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    batches = epoch_batches(examples, batch_size=1, batch_tokens=tokens, generator=generator)
    assert sorted(i for batch in batches for i in batch) == list(range(len(examples)))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= tokens or len(batch) == 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9))
def test_response_counts(responses: list[list[int]]) -> None:
    """In the order of their first occurrence, which decides between equals of a vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples_module, "COUNTED_AT_ONCE", 2)
        found = examples_module.response_counts(Example((1, 2), ids) for ids in responses)
    expected = Counter(token for ids in responses for token in ids)
    assert list(found.items()) == list(expected.items())


def test_examples_of_several_turns() -> None:
    example = Example((1, 2), (3,), (4,), (5, 6))
    assert example.token_ids == (1, 2, 3, 4, 5, 6)
    assert example.response_ids == (3, 5, 6)
    assert [int(mark) for mark in example.response_mask] == [0, 0, 1, 0, 1, 1]
    assert Example.from_mask(example.token_ids, example.response_mask) == example
    assert Example.from_mask((1, 2, 3, 4), (0, 1, 0, 0)) == Example((1,), (2,))
    assert Example.from_mask((1, 2), (1, 1)).pieces == ((), (1, 2))
    assert example.cut(4) is None
    assert example.cut(5) is None
    assert example.cut(6) == example
    assert Example((1,), (2, 3, 4), (5,), (6,)).cut(5) == Example((1,), (2, 3, 4))


def test_the_next_epoch_has_another_order() -> None:
    examples = [Example((1,), (2,) * n) for n in range(1, 40)]
    generator = torch.Generator().manual_seed(0)
    first, second = (epoch_batches(examples, batch_size=4, generator=generator) for _ in range(2))
    assert first != second


def test_frequent_tokens() -> None:
    examples = [Example((9, 9, 9, 9), (1, 1, 1, 5, 5, 7)), Example((0,), (1, 5, 8))]
    kept = frequent_tokens(examples, size=3, always=[3])
    assert kept is not None
    assert kept.tolist() == [1, 3, 5]
    assert kept.dtype == torch.long
    assert frequent_tokens(examples, size=0, always=[3]) is None
    everything = frequent_tokens(examples, size=100, always=[3])
    assert everything is not None
    assert everything.tolist() == [1, 3, 5, 7, 8]
