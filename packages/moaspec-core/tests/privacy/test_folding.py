"""What reads the same is the same, and every character is found again."""

from __future__ import annotations

from typing import Literal, get_args
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaspec_core.privacy.folding import fold

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(
            " \u00a0\u2009\nAaßẞÉe\u0301\u0327\u0345\ufb01\uff11\u0664"
            "\u200b\u00ad\ufe0f가ᄀ\u1161<\uff1c\u2013"
        ),
    ),
    max_size=20,
)


@given(TEXTS, st.sampled_from(get_args(Form)))
def test_normal_forms_are_one(text: str, form: Form) -> None:
    assert fold(normalize(form, text)).text == fold(text).text


@given(TEXTS)
def test_folding_twice_is_folding_once(text: str) -> None:
    once = fold(text).text
    assert fold(once).text == once


@given(TEXTS, st.data())
def test_spans_hold_what_was_folded(text: str, data: st.DataObject) -> None:
    folded = fold(text)
    if not folded.text:
        return
    start = data.draw(st.integers(0, len(folded.text) - 1))
    stop = data.draw(st.integers(start + 1, len(folded.text)))
    first, end = folded.span(start, stop)
    assert 0 <= first < end <= len(text)
    assert set(folded.text[start:stop]) <= set(fold(text[first:end]).text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ada \u00a0\t\nLovelace", "ada lovelace"),
        ("WEISSGERBER", "weissgerber"),
        ("Weißgerber", "weissgerber"),
        ("A\u200bd\u00ad\u2060a\x00", "ada"),
        ("\uff14\uff11\u0661", "411"),
        ("12\u201334\u221256\u2014", "12-34-56-"),
        ("\uff1cb\uff1e \u2329\u27e8", "<b> <<"),
        ("O\u2019Brien", "o'brien"),
    ],
)
def test_what_becomes_the_same(text: str, expected: str) -> None:
    assert fold(text).text == expected


def test_spans_take_accents_along() -> None:
    text = "e\u0301te\u0301"
    assert fold(text).span(0, 3) == (0, len(text))
