"""Private text goes, and comes back exactly."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaspec_core.errors import InputError
from moaspec_core.privacy.spans import Span, marked
from moaspec_core.privacy.vault import Vault

TEXT = "Write to bob@example.org or call +49 30 901820, card 4111 1111 1111 1111."


def test_recognised_text_is_replaced_and_restored() -> None:
    vault = Vault()
    hidden = vault.hide(TEXT)
    assert hidden == "Write to [EMAIL_1] or call [PHONE_1], card [CARD_1]."
    assert vault.restore(hidden) == TEXT


def test_marks_are_removed() -> None:
    vault = Vault(())
    assert vault.hide("I am <private>Ada Lovelace</private>.") == "I am [PRIVATE_1]."
    assert vault.restore("Hello [PRIVATE_1]!") == "Hello Ada Lovelace!"


def test_the_same_text_has_the_same_placeholder_for_good() -> None:
    vault = Vault(())
    vault.hide("<private>Ada</private> and <private>Bob</private>")
    assert vault.hide("<private>Bob</private>, Ada, BOB") == "[PRIVATE_2], [PRIVATE_1], [PRIVATE_3]"
    assert vault.restore("[PRIVATE_3]") == "BOB"


def test_unmarked_occurrences_are_private_too() -> None:
    vault = Vault(())
    assert vault.hide("Lovelace: <private>Lovelace</private>s") == "[PRIVATE_1]: [PRIVATE_1]s"


def test_short_text_is_looked_for_as_a_word() -> None:
    vault = Vault(())
    assert vault.hide("<private>Al</private> also met Al") == "[PRIVATE_1] also met [PRIVATE_1]"


def test_what_one_message_marks_is_hidden_in_all() -> None:
    vault = Vault(())
    messages = [
        {"role": "user", "content": "My cat is called Schroedinger."},
        {"role": "user", "content": "Forget <private>Schroedinger</private>."},
    ]
    assert [one["content"] for one in vault.hide_messages(messages)] == [
        "My cat is called [PRIVATE_1].",
        "Forget [PRIVATE_1].",
    ]


def test_answers_of_earlier_turns_are_hidden_again() -> None:
    vault = Vault()
    hidden = vault.hide(TEXT)
    assert vault.hide(vault.restore(hidden)) == hidden


def test_text_that_looks_like_a_placeholder_survives() -> None:
    vault = Vault()
    text = "bob@example.org is [EMAIL_1], not [EMAIL_2]"
    hidden = vault.hide(text)
    assert hidden == "[EMAIL_1] is [TEXT_1], not [TEXT_2]"
    assert vault.restore(hidden) == text


def test_overlapping_spans_become_one() -> None:
    vault = Vault(())
    assert vault.hide_spans("abcdefgh", [Span(1, 4), Span(3, 6, "NAME")]) == "a[PRIVATE_2]gh"
    assert vault.restore("[PRIVATE_2]") == "bcdef"


@pytest.mark.parametrize(
    "text",
    ["<private>a", "a</private>", "<private>a<private>b</private></private>", "<private><private>"],
)
def test_marks_without_partner_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Vault(()).hide(text)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<Private>", "</Private>"),
        ("<PRIVATE>", "</private>"),
        ("<private >", "</ private >"),
        ("< private>", "< /private>"),
        ("<private\n>", "</private\t>"),
        ("<pri vate>", "</privat\u00a0e>"),
        ("\uff1cprivate\uff1e", "\uff1c\uff0fprivate\uff1e"),
        ("<\uff50\uff52\uff49\uff56\uff41\uff54\uff45>", "</private>"),
        ("<priv\u200bate>", "<\u200b/private\ufeff>"),
        ("<pri\u00advate>", "</private>"),
        ("<PR\u0130VATE>", "</pr\u0131vate>"),
        ("<priv\u00e1te>", "</private>"),
        ("<\u0440riv\u0430te>", "</private>"),
        ("\u27e8private\u27e9", "\u2329/private\u232a"),
        ("&lt;private&gt;", "&lt;/private&gt;"),
        ("&#60;private&#62;", "&#x3C;/private&#x3E;"),
    ],
)
def test_marks_however_they_are_spelled(opening: str, closing: str) -> None:
    vault = Vault(())
    assert vault.hide(f"I am {opening}Ada{closing}.") == "I am [PRIVATE_1]."
    assert vault.restore("[PRIVATE_1]") == "Ada"


@pytest.mark.parametrize(
    "text",
    [
        "<private>Ada",
        "<Private>Ada</Private",
        "<private Ada</private>",
        "<private kind='name'>Ada</private>",
        "<private/>",
        "<private>Ada<private/>",
        "<private>Ada<\\private>",
        "<private>Ada<//private>",
        "<PRIVATE>a<private>b</private></PRIVATE>",
        "Ada</Private>",
        "<private_>Ada</private_>",
        "<private",
        "&lt;private Ada",
    ],
)
def test_what_looks_like_a_mark_is_refused(text: str) -> None:
    with pytest.raises(InputError) as refusal:
        Vault(()).hide(text)
    assert "\n" not in str(refusal.value)
    assert "<private>...</private>" in str(refusal.value) or "write </private>" in str(
        refusal.value
    )


@pytest.mark.parametrize(
    "text", ["private", "a <private_key> file", "<privateer>", "<b>", "1 < 2", "(private)"]
)
def test_what_is_no_mark(text: str) -> None:
    assert Vault(()).hide(text) == text


@pytest.mark.parametrize(
    ("private", "again"),
    [
        ("Ada Lovelace", "Ada  Lovelace"),
        ("Ada Lovelace", "ADA\u00a0\nlovelace"),
        ("Ada Lovelace", "AdaLovelace"),
        ("Ada Lovelace", "Ada Love\u00adlace"),
        ("Ada Lovelace", "\uff21\uff44\uff41 Lovelace"),
        (" Ada\nLovelace ", "Ada Lovelace"),
        ("Zo\u00eb M\u00fcller", "Zoe\u0308 Mu\u0308ller"),
        ("Zoe\u0308 Mu\u0308ller", "ZO\u00cb M\u00dcLLER"),
        ("Wei\u00dfgerber", "WEISSGERBER"),
        ("WEISSGERBER", "wei\u00dfgerber"),
        ("O'Brien", "O\u2019Brien"),
        ("Meyer-Landrut", "Meyer\u2013Landrut"),
        ("ABC 123456", "abc 123 456"),
        ("123 456", "123456"),
        ("\uac00\ub098\ub2e4\ub77c", "\u1100\u1161\u1102\u1161\u1103\u1161\u1105\u1161"),
    ],
)
def test_known_text_in_another_spelling(private: str, again: str) -> None:
    vault = Vault(())
    vault.hide(f"<private>{private}</private>")
    hidden = vault.hide(f"It is {again}.")
    assert again not in hidden
    assert len(hidden) <= len("It is [PRIVATE_2].")
    assert vault.restore(hidden) == f"It is {again}."


def test_joined_words_are_looked_for_as_a_word() -> None:
    vault = Vault(())
    assert vault.hide("<private>in a</private> China") == "[PRIVATE_1] China"


def test_private_spaces_are_not_looked_for() -> None:
    vault = Vault(())
    assert vault.hide("a b<private> </private>c d") == "a b[PRIVATE_1]c d"


def test_an_empty_mark_hides_nothing() -> None:
    assert Vault(()).hide("a<private></private>b") == "ab"


@pytest.mark.parametrize("span", [(0, 0, "NAME"), (-1, 2, "NAME"), (0, 1, "name"), (0, 1, "A_B")])
def test_spans_that_cannot_be(span: tuple[int, int, str]) -> None:
    with pytest.raises(InputError):
        Span(*span)


def test_a_span_past_the_end() -> None:
    with pytest.raises(InputError):
        Vault(()).hide_spans("abc", [Span(1, 4)])


def test_the_mapping_stays_in_memory() -> None:
    vault = Vault()
    vault.hide(TEXT)
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="memory"):
            leave(vault)
    assert "bob" not in repr(vault)


# Streams


@given(st.lists(st.integers(1, 9), max_size=30))
def test_pieces_restore_as_the_whole(cuts: list[int]) -> None:
    vault = Vault()
    hidden = vault.hide(TEXT) + " [EMAIL_ [EMAIL_1 [[PHONE_1]] [X"
    restorer, shown, place = vault.restorer(), "", 0
    for size in [*cuts, len(hidden)]:
        shown += restorer.push(hidden[place : place + size])
        place += size
    assert shown + restorer.close() == vault.restore(hidden)


def test_only_what_may_be_a_placeholder_waits() -> None:
    vault = Vault()
    vault.hide(TEXT)
    restorer = vault.restorer()
    assert restorer.push("to [EMA") == "to "
    assert restorer.push("IL_1") == ""
    assert restorer.push("] or [not") == "bob@example.org or [not"
    assert restorer.push(" [") == " "
    assert restorer.close() == "["


WORDS = st.sampled_from(
    [" ", "a", "Ada", "[EMAIL_1]", "[", "EMAIL_1]", "x@y.org", "4111111111111111", "_", "\n", "é"]
)


@given(st.lists(st.tuples(WORDS, st.booleans()), max_size=12))
def test_hiding_and_restoring_gives_the_text_and_hides_it(words: list[tuple[str, bool]]) -> None:
    text = "".join(f"<private>{word}</private>" if secret else word for word, secret in words)
    vault = Vault()
    plain, spans = marked(text)
    hidden = vault.hide(text)
    assert vault.restore(hidden) == plain
    for span in spans:
        value = plain[span.start : span.stop]
        # Shorter text, or a placeholder's own characters, may stand in placeholders.
        if len(value) > 3 and not value.startswith("[") and not value.endswith("]"):
            assert value not in hidden
