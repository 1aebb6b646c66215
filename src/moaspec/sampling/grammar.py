"""Text that follows a grammar: a logits processor over llguidance.

The processor is a function of the prefix alone, as speculation needs. It keeps a matcher that has
read the last prefix, and rolls it back to the common beginning with the next one, which is a few
tokens away.

Legend: V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from moaspec.errors import InputError
from moaspec.sampling import grammar_worker
from moaspec.sampling.token_ids import common_length
from moaspec.support import limits

if TYPE_CHECKING:
    from torch import Tensor

COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and most training texts write it. Free white space would let a small model write
blanks until its tokens are spent."""


KEPT = 32  # most compiled grammars in the cache: apps send the same schema again and again

KEPT_CHARACTERS = limits.MAX_GRAMMAR
"""Most characters of these: a compiled grammar takes 300 bytes per character."""

TRIED = 4096  # most remembered digests of grammars that are known to compile
TRIALS = 2  # most grammars that are tried at the same time

WAIT_S = 60.0
"""Seconds after which a trial is ended. Its processor time is shorter: the machine may be busy."""

RULE = re.compile(r'^\s*[?!]?\w[^"/:\n]*:|\$ref\b', re.MULTILINE)
"""Where a rule of Lark begins, or a reference of a JSON schema."""

T = TypeVar("T")

_STACKS = threading.Lock()  # held while the stack size of new threads is changed


class Grammars:
    """Compiles grammars for one tokenizer. May be called from several threads.

    Args:
        stop_token_ids: ids that end a text; the grammar allows them where it is complete.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self._hf, self._vocab_size, self._stops = tokenizer, vocab_size, sorted(stop_token_ids)
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._tried: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._trials = threading.Semaphore(TRIALS)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: it takes a second."""
        if not self._stops:
            raise InputError(
                "This target has no token that ends a text, so no grammar can; ask for plain text."
            )
        backend = copy(self._hf.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=self._stops)

    def json_schema(self, schema: dict[str, Any]) -> str:
        """A grammar for JSON of a schema; InputError where llguidance does not support it."""
        if limits.too_deep(schema):
            raise InputError(f"The JSON schema nests over {limits.MAX_JSON_DEPTH} levels deep.")
        try:
            return self._checked(LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"The JSON schema cannot be used: {error}") from error

    def lark(self, text: str) -> str:
        """A grammar in llguidance's own form of Lark; InputError where it cannot be compiled."""
        return self._checked(LLMatcher.grammar_from_lark(text))

    def processor(self, grammar: str, prompt_length: int) -> GrammarProcessor:
        return GrammarProcessor(grammar, self._compiled(grammar).deep_copy(), prompt_length)

    def _checked(self, grammar: str) -> str:
        self._compiled(grammar)
        return grammar

    def _compiled(self, grammar: str) -> LLMatcher:
        """A compiled matcher to copy: compiling may take seconds, copying does not."""
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
                return self._known[grammar]
        self._try(grammar)
        matcher = _on_large_stack(lambda: LLMatcher(self.tokenizer, grammar, log_level=0))
        if matcher.is_error():
            raise InputError(f"The JSON schema cannot be used: {matcher.get_error()}")
        with self._lock:
            self._known[grammar] = matcher
            _forget_oldest(self._known, KEPT)
            while sum(map(len, self._known)) > KEPT_CHARACTERS:
                self._known.popitem(last=False)
        return matcher

    def _try(self, grammar: str) -> None:
        """Refuse a grammar that could end this process. InputError: says why."""
        digest = sha256(grammar.encode(errors="replace")).digest()
        with self._lock:
            if digest in self._tried:
                self._tried.move_to_end(digest)
                return
        check_size(grammar)
        with self._trials:
            _compile_elsewhere(grammar, self._vocab_size)
        with self._lock:
            self._tried[digest] = None
            _forget_oldest(self._tried, TRIED)


def check_size(grammar: str) -> None:
    """InputError for a grammar with too many characters, rules or references."""
    if len(grammar) > limits.MAX_GRAMMAR:
        raise InputError(
            f"The JSON schema or grammar has {len(grammar)} characters; at most "
            f"{limits.MAX_GRAMMAR} are taken."
        )
    rules = sum(1 for _ in RULE.finditer(grammar))
    if rules > limits.MAX_GRAMMAR_RULES:
        raise InputError(
            f"The JSON schema or grammar has {rules} rules and references; at most "
            f"{limits.MAX_GRAMMAR_RULES} are taken."
        )


def _compile_elsewhere(grammar: str, vocab_size: int) -> None:
    """Compile in a process with limited memory, stack and time. InputError: it failed."""
    given = {
        "grammar": grammar,
        "vocab_size": vocab_size,
        "path": sys.path,
        "stack": limits.MAX_GRAMMAR_STACK,
        "memory": limits.MAX_GRAMMAR_MEMORY,
        "seconds": limits.MAX_GRAMMAR_S,
    }
    script = str(Path(grammar_worker.__file__))
    try:
        ended = subprocess.run(  # noqa: S603 - our own script
            [sys.executable, "-I", script],
            input=json.dumps(given).encode(),
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_much() from None
    except OSError as error:
        raise InputError(f"No process can be started to try a grammar: {error}.") from error
    if ended.returncode != 0:
        raise _too_much()


def _too_much() -> InputError:
    return InputError(
        "The JSON schema or grammar takes too much time or memory, or nests or refers too deeply; "
        "make it simpler."
    )


def _on_large_stack(compute: Callable[[], T]) -> T:
    """Run in a thread with a stack of eight times the limit of a grammar."""
    with _STACKS:
        before = threading.stack_size(8 * limits.MAX_GRAMMAR_STACK)
        try:
            pool = ThreadPoolExecutor(1)
            running = pool.submit(compute)  # starts the thread
        finally:
            threading.stack_size(before)
    with pool:
        return running.result()


def _forget_oldest(known: OrderedDict[Any, Any], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)


class GrammarProcessor:
    """Forbids tokens that the grammar does not allow after a prefix.

    If the matcher fails (a grammar beyond its limits), all tokens are allowed again. The text then
    ends by its other limits and does not follow the grammar.

    Args:
        grammar: text of the grammar, which can be sent to a server in place of the processor.
        matcher: a new matcher of this grammar.
        prompt_length: tokens at the start of a prefix that the grammar ignores.
    """

    def __init__(self, grammar: str, matcher: LLMatcher, prompt_length: int) -> None:
        self.grammar = grammar
        self._matcher, self._prompt_length = matcher, prompt_length
        self._read: list[int] = []

    def __call__(self, prefix_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits with forbidden tokens at -inf; see `LogitsProcessor`."""
        return _masked(logits_V, self._bitmask(prefix_ids))

    def along(self, prefix_ids: Sequence[int], drafts: Sequence[int]) -> DraftMasks:
        """The masks after a prefix and after each of these drafts, to send to another process."""
        text, bitmasks = list(prefix_ids), [self._bitmask(prefix_ids)]
        for token in drafts:
            bits = bitmasks[-1]
            if bits is None or not bits[token // 8] >> token % 8 & 1:
                break  # all is allowed from here on, or the draft will be rejected
            text.append(token)
            bitmasks.append(self._bitmask(text))
        return DraftMasks(len(prefix_ids), tuple(bitmasks))

    def _bitmask(self, prefix_ids: Sequence[int]) -> bytes | None:
        """Allowed tokens, one bit each; None if the matcher has failed."""
        self._go_to(list(prefix_ids[self._prompt_length :]))
        return None if self._matcher.is_error() else self._matcher.compute_bitmask()

    def _go_to(self, output: list[int]) -> None:
        common = common_length(self._read, output)
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        self._matcher.consume_tokens(output[common:])
        self._read = output


@dataclass(frozen=True)
class DraftMasks:
    """The masks of a `GrammarProcessor` along one chain of drafts; can be sent to a process.

    Attributes:
        length: tokens before the first draft.
        bitmasks: allowed tokens after the drafts; those after the last one are never asked for.
    """

    length: int
    bitmasks: tuple[bytes | None, ...]

    def __call__(self, prefix_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits with forbidden tokens at -inf, by the mask of this prefix."""
        assert len(prefix_ids) >= self.length
        place = min(len(prefix_ids) - self.length, len(self.bitmasks) - 1)
        return _masked(logits_V, self.bitmasks[place])


def _masked(logits_V: Tensor, bitmask: bytes | None) -> Tensor:
    import torch  # not at an edge, which only sends the grammar

    if bitmask is None:
        return logits_V
    bits = np.frombuffer(bitmask, dtype=np.uint8)
    allowed = np.unpackbits(bits, bitorder="little", count=logits_V.shape[0])
    forbidden_V = torch.from_numpy(allowed == 0).to(logits_V.device)
    return logits_V.masked_fill(forbidden_V, -math.inf)
