"""Text of tokens as they come, with a tokenizer that falls back to bytes."""

from __future__ import annotations

from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models

from moaspec_core.sampling.incremental_text import TextStream
from moaspec_core.sampling.stop_strings import StopStrings

VOCABULARY = ["<unk>", "<0x0A>", "<0xF0>", "a", "E", "N", "D"]
BACKEND = Tokenizer(
    models.BPE(
        vocab={token: i for i, token in enumerate(VOCABULARY)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
)
BACKEND.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
TOKENIZER = SimpleNamespace(backend_tokenizer=BACKEND)
NEWLINE, BROKEN, A, E, N, D = range(1, 7)


def test_a_byte_that_is_no_character_does_not_end_the_text() -> None:
    """The line break was given out; read together with the byte after it, it is none."""
    stream = TextStream(TOKENIZER, skip_special_tokens=False)
    pieces = [stream.step(token) for token in (A, NEWLINE, BROKEN, A, E)]
    assert pieces[0] == "a"
    assert pieces[-1] == "E"


def test_a_stop_string_is_found_behind_it() -> None:
    watch = StopStrings(("END",), TOKENIZER)
    found = [watch.push(token) for token in (NEWLINE, BROKEN, A, E, N, D)]
    assert found == [None] * 5 + ["END"]
