"""Text that follows a grammar: a logits processor over llguidance.

The processor is a function of the prefix alone, as speculation needs: it keeps a matcher that has
read some prefix, and rolls it back to what that and the next prefix have in common. Calls walk
along a text, so this is a few tokens each time.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from moaspec.decode.engine import common_length
from moaspec.errors import InputError

COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and most training texts write it. Free white space would let a small model write
blanks until its tokens are spent."""


KEPT = 32
"""Compiled grammars that are remembered: apps send the same schema again and again."""


class Grammars:
    """Compiles grammars for one tokenizer. May be called from several threads.

    Args:
        tokenizer: the target's, of transformers.
        vocab_size: the target's.
        stop_token_ids: ids that end a text; the grammar allows them where it is complete.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self._hf, self._vocab_size, self._stops = tokenizer, vocab_size, sorted(stop_token_ids)
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.RLock()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: it takes a second."""
        if not self._stops:
            raise InputError(
                "This target has no token that ends a text, so no grammar can; ask for plain text."
            )
        return from_tokenizer(self._hf, n_vocab=self._vocab_size, eos_token=self._stops)

    def json_schema(self, schema: dict[str, Any]) -> str:
        """A grammar of the JSON texts that a schema allows.

        Raises:
            InputError: something that is no JSON schema, or uses what llguidance does not know.
        """
        try:
            return self._checked(LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"The JSON schema cannot be used: {error}") from error

    def lark(self, text: str) -> str:
        """A grammar in llguidance's own form of Lark.

        Raises:
            InputError: one that cannot be compiled.
        """
        return self._checked(LLMatcher.grammar_from_lark(text))

    def processor(self, grammar: str, prompt_length: int) -> GrammarProcessor:
        """The logits processor of one text."""
        return GrammarProcessor(grammar, self._compiled(grammar).deep_copy(), prompt_length)

    def _checked(self, grammar: str) -> str:
        self._compiled(grammar)
        return grammar

    def _compiled(self, grammar: str) -> LLMatcher:
        """A fresh matcher, to be copied: compiling takes up to seconds, copying does not."""
        with self._lock:
            if grammar not in self._known:
                matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
                if matcher.is_error():
                    raise InputError(f"The JSON schema cannot be used: {matcher.get_error()}")
                self._known[grammar] = matcher
            self._known.move_to_end(grammar)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            return self._known[grammar]


class GrammarProcessor:
    """Forbids tokens that the grammar does not allow after a prefix.

    Where the matcher gives up (a grammar beyond its limits), everything is allowed again: the text
    then ends by its other limits, and whoever reads it finds that it does not follow the grammar.

    Args:
        grammar: that it keeps to; it can travel, which a processor cannot.
        matcher: of it, fresh.
        prompt_length: tokens of a prefix that the grammar does not read.
    """

    def __init__(self, grammar: str, matcher: LLMatcher, prompt_length: int) -> None:
        self.grammar = grammar
        self._matcher, self._prompt_length = matcher, prompt_length
        self._read: list[int] = []

    def __call__(self, prefix_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """See `LogitsProcessor`."""
        self._go_to(list(prefix_ids[self._prompt_length :]))
        if self._matcher.is_error():
            return logits_V
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits_V.shape[0])
        forbidden_V = torch.from_numpy(allowed == 0).to(logits_V.device)
        return logits_V.masked_fill(forbidden_V, -math.inf)

    def _go_to(self, output: list[int]) -> None:
        common = common_length(self._read, output)
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        self._matcher.consume_tokens(output[common:])
        self._read = output
