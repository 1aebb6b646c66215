"""Text that follows a grammar: a logits processor over llguidance.

The processor is a function of the prefix alone, as speculation needs: it keeps a matcher that has
read some prefix, and rolls it back to what that and the next prefix have in common. Calls walk along
a text, so this is a few tokens each time.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from moaspec.decode.row import common_length
from moaspec.errors import InputError
from moaspec.serve.source import SourceFacts

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and most training texts write it. Free white space would let a small model write
blanks until its tokens are spent."""


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        facts: of the target.
    """

    def __init__(self, facts: SourceFacts) -> None:
        self._facts = facts

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: it takes a second."""
        stops = sorted(self._facts.stop_token_ids)
        if not stops:
            raise InputError(
                f"{self._facts.name} has no token that ends a text, so no grammar can; ask for "
                "plain text."
            )
        return from_tokenizer(
            self._facts.tokenizer, n_vocab=self._facts.vocab_size, eos_token=stops
        )

    def json_schema(self, schema: dict[str, Any]) -> str:
        """A grammar of the JSON texts that a schema allows.

        Raises:
            InputError: something that is no JSON schema, or uses what llguidance does not know.
        """
        try:
            return self._checked(LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT))
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
        return GrammarProcessor(LLMatcher(self.tokenizer, grammar, log_level=0), prompt_length)

    def _checked(self, grammar: str) -> str:
        problem = LLMatcher.validate_grammar(grammar, self.tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise InputError(f"The JSON schema cannot be used: {problem}")
        return grammar


class GrammarProcessor:
    """Forbids tokens that the grammar does not allow after a prefix.

    Where the matcher gives up (a grammar beyond its limits), everything is allowed again: the text
    then ends by its other limits, and whoever reads it finds that it does not follow the grammar.

    Args:
        matcher: fresh.
        prompt_length: tokens of a prefix that the grammar does not read.
    """

    def __init__(self, matcher: LLMatcher, prompt_length: int) -> None:
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
