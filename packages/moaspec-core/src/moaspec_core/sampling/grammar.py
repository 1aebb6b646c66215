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
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from moaspec_core.errors import InputError
from moaspec_core.sampling import grammar_worker
from moaspec_core.sampling.endless_schemas import check_ends
from moaspec_core.sampling.schema_values import readable
from moaspec_core.sampling.token_ids import common_length
from moaspec_core.support import limits
from moaspec_core.support.causes import first_line

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

LINES_OF_LARK = re.compile(r"\n *\d+ \| ")
IN_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
"""Where a schema stands in the grammar of a tool call."""

T = TypeVar("T")

_STACKS = threading.Lock()  # held while the stack size of new threads is changed


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar."""

    text: str  # in llguidance's form; can be sent to a server
    matcher: LLMatcher  # has read nothing; to copy, which is fast
    stops: bytes  # bitmask of the tokens that end a text

    def processor(self, prompt_length: int) -> GrammarProcessor:
        return GrammarProcessor(self, prompt_length)

    def check_ended(self, output: Sequence[int]) -> None:
        """InputError where a text ended, by a token that ends it, and the grammar is not complete.

        Such a text is the sign of a grammar that could not be followed; see `GrammarProcessor`.
        """
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(list(output))
        if matcher.is_error():
            raise InputError(
                "The text ends before it is complete: what the JSON schema or grammar allows next "
                f"cannot be computed within {limits.MAX_MASK_S} s, or other settings forbid it "
                f"({_reason(matcher)}). Make the schema or grammar simpler."
            )


class Grammars:
    """Compiles grammars for one tokenizer. May be called from several threads.

    Args:
        stop_token_ids: ids that end a text; the grammar allows them where it is complete.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self._hf, self._vocab_size, self._stops = tokenizer, vocab_size, sorted(stop_token_ids)
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._tried: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._trials = threading.Semaphore(TRIALS)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Made once: it takes a second, during which no other Python code runs."""
        if not self._stops:
            raise InputError(
                "This target has no token that ends a text, so no grammar can; ask for plain text."
            )
        backend = copy(self._hf.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        try:
            return LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=self._stops)
        except ValueError as error:  # of a kind that llguidance does not read
            raise InputError(
                f"Grammars cannot follow this target's tokenizer: {first_line(error)}. Ask for "
                "plain text."
            ) from error

    def json_schema(self, schema: dict[str, Any]) -> Grammar:
        """A grammar of a schema's JSON; InputError where llguidance does not support it."""
        return self.compiled(json_grammar(schema))

    def lark(self, text: str) -> Grammar:
        """A grammar in llguidance's own form of Lark; InputError where it cannot be compiled."""
        return self.compiled(lark_grammar(text))

    def known(self, text: str) -> Grammar | None:
        """A grammar that is compiled already; None where it must be compiled."""
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
            return self._known.get(text)

    def compiled(self, text: str) -> Grammar:
        """Compile a grammar in llguidance's form, which may take seconds, or find it.

        Raises:
            InputError: it cannot be compiled, or takes too much time or memory.
        """
        if (known := self.known(text)) is not None:
            return known
        self._try(text)
        matcher = _on_large_stack(lambda: self._new_matcher(text))
        if matcher.is_error():
            raise InputError(f"The JSON schema or grammar cannot be used: {_reason(matcher)}")
        grammar = Grammar(text, matcher, _bitmask_of(self._stops, self._vocab_size))
        with self._lock:
            self._known[text] = grammar
            _forget_oldest(self._known, KEPT)
            while sum(map(len, self._known)) > KEPT_CHARACTERS:
                self._known.popitem(last=False)
        return grammar

    def prepare(self) -> None:
        """Make what all grammars share, so that no request waits for another's first grammar.

        Where there can be no grammars, each request for one is refused.
        """
        with suppress(InputError):
            _ = self.tokenizer

    def _new_matcher(self, grammar: str) -> LLMatcher:
        limited = LLParserLimits(max_items_in_row=limits.MAX_GRAMMAR_ITEMS)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limited)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits show here first
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


def json_grammar(schema: dict[str, Any]) -> str:
    """The text of a grammar for JSON of a schema; InputError where no text could follow it."""
    if limits.too_deep(schema):
        raise InputError(f"The JSON schema nests over {limits.MAX_JSON_DEPTH} levels deep.")
    check_ends(schema)
    schema = readable(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT))
    except ValueError as error:
        raise InputError(f"The JSON schema cannot be used: {error}") from error


def lark_grammar(text: str) -> str:
    """The text of a grammar that is given in llguidance's own form of Lark."""
    return str(LLMatcher.grammar_from_lark(text))


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
        "items": limits.MAX_GRAMMAR_ITEMS,
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


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, without its state and the lines of a grammar, which llguidance adds.

    The grammar of tool calls is moaspec's own.
    """
    told: str = matcher.get_error().partition("\n<state>")[0]
    return IN_SCHEMA.sub("", LINES_OF_LARK.split(told)[0])


def _bitmask_of(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """One bit for each token of the vocabulary, set for these."""
    allowed = np.zeros(vocab_size, dtype=np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").tobytes()


class GrammarProcessor:
    """Forbids tokens that the grammar does not allow after a prefix.

    Where none is left, only tokens that end the text are allowed: the matcher has failed (a grammar
    beyond its limits), one of its masks took longer than `MAX_MASK_S`, or other settings forbid all
    tokens that the grammar allows. So no text
    leaves the grammar, and `Grammar.check_ended` tells that it is not complete. An exception here
    would end the pass of all requests.

    Args:
        prompt_length: tokens at the start of a prefix that the grammar ignores.

    Attributes:
        grammar: text of the grammar, which can be sent to a server in place of the processor.
    """

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.grammar = grammar.text
        self._new, self._stops = grammar.matcher, grammar.stops
        self._prompt_length = prompt_length
        self._matcher, self._read = self._new.deep_copy(), list[int]()
        self._too_slow = False

    def __call__(self, prefix_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits with forbidden tokens at -inf; see `LogitsProcessor`."""
        return _masked(logits_V, self._bitmask(prefix_ids), self._stops)

    def along(self, prefix_ids: Sequence[int], drafts: Sequence[int]) -> DraftMasks:
        """The masks after a prefix and after each of these drafts, to send to another process."""
        text, bitmasks = list(prefix_ids), [self._bitmask(prefix_ids)]
        for token in drafts:
            if not bitmasks[-1][token // 8] >> token % 8 & 1:
                break  # the draft will be rejected
            text.append(token)
            bitmasks.append(self._bitmask(text))
        return DraftMasks(len(prefix_ids), tuple(bitmasks), self._stops)

    def _bitmask(self, prefix_ids: Sequence[int]) -> bytes:
        """Allowed tokens, one bit each."""
        if self._too_slow:
            return self._stops
        started_s = time.thread_time()
        self._go_to(list(prefix_ids[self._prompt_length :]))
        bitmask = self._stops
        if not self._matcher.is_error():
            found: bytes = self._matcher.compute_bitmask()
            bitmask = bitmask if self._matcher.is_error() else found
        if time.thread_time() - started_s > limits.MAX_MASK_S:
            self._too_slow = True
            return self._stops
        return bitmask

    def _go_to(self, output: list[int]) -> None:
        common = common_length(self._read, output)
        if self._matcher.is_error():  # it stays so, and this prefix may be another
            self._matcher, common = self._new.deep_copy(), 0
        elif common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        self._matcher.consume_tokens(output[common:])
        self._read = output


@dataclass(frozen=True)
class DraftMasks:
    """The masks of a `GrammarProcessor` along one chain of drafts; can be sent to a process.

    Attributes:
        length: tokens before the first draft.
        bitmasks: allowed tokens after the drafts; those after the last one are never asked for.
        stops: bitmask of the tokens that end a text.
    """

    length: int
    bitmasks: tuple[bytes, ...]
    stops: bytes

    def __call__(self, prefix_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The logits with forbidden tokens at -inf, by the mask of this prefix."""
        assert len(prefix_ids) >= self.length
        place = min(len(prefix_ids) - self.length, len(self.bitmasks) - 1)
        return _masked(logits_V, self.bitmasks[place], self.stops)


def _masked(logits_V: Tensor, bitmask: bytes, stops: bytes) -> Tensor:
    import torch  # not at an edge, which only sends the grammar

    masked_V = logits_V.masked_fill(~_allowed(bitmask, logits_V), -math.inf)
    if bool(torch.isfinite(masked_V.max())):
        return masked_V
    return torch.zeros_like(logits_V).masked_fill(~_allowed(stops, logits_V), -math.inf)


def _allowed(bitmask: bytes, logits_V: Tensor) -> Tensor:
    import torch

    bits = np.frombuffer(bitmask, dtype=np.uint8)
    allowed = np.unpackbits(bits, bitorder="little", count=logits_V.shape[0])
    return torch.from_numpy(allowed == 1).to(logits_V.device)
