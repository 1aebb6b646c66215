"""Conversion between protobuf messages and our own objects; limits all received values."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.engine.request_state import Source
from moaspec_core.errors import InputError, WireError
from moaspec_core.sampling.params import SamplingParams, plain_settings
from moaspec_core.support.limits import (
    MAX_DRAFTED,
    MAX_FRAME_BYTES,
    MAX_GRAMMAR,
    MAX_LOGIT_BIAS,
    MAX_RULE_TOKENS,
    MAX_RUNS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_WORD_TOKENS,
    MAX_WORDS,
    MAX_WORDS_TOKENS,
)
from moaspec_core.tokens.token_rules import NO_RULES, TokenRules
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.codec import CodecName
from moaspec_edge.protocol.position_ranges import PositionRange

M = TypeVar("M", bound=Message)

SESSION_BYTES = 16  # length of a session's random name

MAX_MESSAGE = 500  # characters of a server's message that are shown to the user

CODEC_NUMBERS: dict[CodecName, pb.Codec] = {
    "fp16": pb.CODEC_FP16,
    "int8": pb.CODEC_INT8,
    "int4": pb.CODEC_INT4,
}
CODEC_NAMES: dict[int, CodecName] = {int(number): name for name, number in CODEC_NUMBERS.items()}

SOURCES: tuple[Source, ...] = ("target", "draft", "copy")
"""Their indices are the numbers on the wire."""

RULE_VALUES = (
    "no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "remove_invalid_values",
    "max_new_tokens",
)
RULE_LISTS = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "stop_token_ids")
RULE_OPTIONS = ("forced_bos_token_id",)
"""Token rules whose message has the same name: always set, lists, and set or absent."""


@dataclass(frozen=True)
class WireLimits:
    """Limits of a message."""

    vocab_size: int  # token ids are below it
    max_tokens: int  # longest text

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest message of a client that breaks no other limit.

        Token ids take at most 5 bytes, characters 4, and other entries 16 with their numbers.
        """
        token_ids = self.max_tokens + MAX_STOP_TOKENS + 4 * MAX_RULE_TOKENS + MAX_WORDS_TOKENS
        characters = MAX_GRAMMAR + MAX_STOP_STRINGS * (MAX_STOP_CHARACTERS + 1)
        entries = MAX_LOGIT_BIAS + MAX_RUNS + MAX_WORDS + MAX_DRAFTED
        fixed = 4096  # numbers, the names of the target and the drafter
        return min(5 * token_ids + 4 * characters + 16 * entries + fixed, MAX_FRAME_BYTES)


def parse_client(frame: bytes) -> pb.ClientMessage:
    """Parse a device's message; WireError for an invalid one."""
    message = parse(frame, pb.ClientMessage())
    if len(message.session) != SESSION_BYTES or message.WhichOneof("kind") is None:
        raise WireError(
            f"A message names its session in {SESSION_BYTES} bytes and has one content; got "
            f"{len(message.session)} bytes and {message.WhichOneof('kind')}."
        )
    return message


def parse_generate(frame: bytes) -> pb.GenerateRequest:
    """Parse a request for a text; WireError for an invalid one, or beyond a limit."""
    request = parse(frame, pb.GenerateRequest())
    _at_most(len(request.stop), MAX_STOP_STRINGS, "stop strings")
    _at_most(len(request.stop_token_ids), MAX_STOP_TOKENS, "stop tokens")
    _at_most(max(map(len, request.stop), default=0), MAX_STOP_CHARACTERS, "characters to stop at")
    return request


def _at_most(number: int, most: int, what: str) -> None:
    """Raise WireError if `number` exceeds the limit."""
    if number > most:
        raise WireError(f"A request has at most {most} {what}; got {number}.")


def parse(frame: bytes, message: M) -> M:
    """Parse a message of target.proto into an empty one; WireError for another or too long one."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"A message of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}.")
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise WireError(f"Not a message of this protocol: {error}.") from error
    return message


def tokens_of(
    ids: Sequence[int], limits: WireLimits, *, least: int = 0, most: int
) -> tuple[int, ...]:
    """Check token ids; WireError for too few or many, or ids outside the vocabulary."""
    if not least <= len(ids) <= most:
        raise WireError(f"Expected {least} to {most} token ids, got {len(ids)}.")
    outside = next((one for one in ids if one >= limits.vocab_size), None)
    if outside is not None:
        raise WireError(
            f"Token id {outside} is outside the target's vocabulary (0..{limits.vocab_size - 1})."
        )
    return tuple(ids)


def tree_of(draft: pb.Draft, limits: WireLimits) -> DraftTree:
    """Check drafts; WireError for too many, wrong ids, or parents that form no tree."""
    tokens = tokens_of(draft.tokens, limits, most=MAX_DRAFTED)
    if not draft.parents:
        return chain(tokens)
    _at_most(len(draft.parents), MAX_DRAFTED, "parents of drafted tokens")
    parents = tuple(parent - 1 for parent in draft.parents)
    fits = len(parents) == len(tokens)
    if not fits or any(parent >= node for node, parent in enumerate(parents)):
        raise WireError("Each drafted token needs a parent that comes before it, or the root.")
    return DraftTree(tokens, parents)


def chain(tokens: Sequence[int]) -> DraftTree:
    """Make a tree of one path."""
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def draft_message(base: int, tree: DraftTree, num_streamed: int = 0) -> pb.Draft:
    """Convert drafts to a message; without any, ask for further tokens."""
    parents = () if tree.is_chain else [parent + 1 for parent in tree.parents]
    num_streamed = 0 if tree.tokens else num_streamed
    return pb.Draft(base=base, tokens=tree.tokens, parents=parents, further=num_streamed)


def runs_of(ranges: Sequence[pb.Range], limits: WireLimits) -> list[PositionRange]:
    """Check ranges of positions; WireError for too many, not ascending, or too large ones."""
    if len(ranges) > MAX_RUNS:
        raise WireError(f"At most {MAX_RUNS} runs of positions, got {len(ranges)}.")
    runs = [(one.start, one.stop) for one in ranges]
    ends = [0, *(end for run in runs for end in run)]
    if ends != sorted(ends) or ends[-1] > limits.max_tokens:
        raise WireError(f"Runs of positions must ascend up to {limits.max_tokens}.")
    return runs


def range_messages(runs: Iterable[PositionRange]) -> list[pb.Range]:
    """Convert ranges to messages; drops those after the first `MAX_RUNS`."""
    return [pb.Range(start=start, stop=stop) for start, stop in list(runs)[:MAX_RUNS]]


def sampling_message(sampling: SamplingParams) -> pb.Sampling:
    """Sampling parameters as a message; InputError for custom processors, which cannot be sent."""
    grammars = [getattr(processor, "grammar", "") for processor in sampling.processors]
    if len(grammars) > 1 or "" in grammars:
        raise InputError(
            "logits_processors are functions, and cannot be sent to a server. Use logit_bias and "
            "the penalties instead."
        )
    return pb.Sampling(
        grammar=grammars[0] if grammars else "",
        **plain_settings(sampling),
        seed=sampling.seed,
        rules=_rules_message(sampling.rules) if sampling.rules else None,
    )


def _rules_message(rules: TokenRules) -> pb.TokenRules:
    start, factor = rules.exponential_decay_length_penalty or (None, None)
    return pb.TokenRules(
        **{name: getattr(rules, name) for name in (*RULE_VALUES, *RULE_LISTS, *RULE_OPTIONS)},
        bad_words_ids=[pb.TokenRules.Word(token_ids=word) for word in rules.bad_words_ids],
        decay_start=start,
        decay_factor=factor,
    )


def _rules_of(message: pb.TokenRules, limits: WireLimits) -> TokenRules:
    """Check token rules; WireError for too many, or ids outside the vocabulary."""
    _check_rules(message)
    values: dict[str, Any] = {name: getattr(message, name) for name in RULE_VALUES}
    values |= {name: tuple(getattr(message, name)) for name in RULE_LISTS}
    values |= {name: getattr(message, name) for name in RULE_OPTIONS if message.HasField(name)}
    decay = (message.decay_start, message.decay_factor)
    rules = TokenRules(
        **values,
        bad_words_ids=tuple(tuple(word.token_ids) for word in message.bad_words_ids),
        exponential_decay_length_penalty=decay if message.HasField("decay_factor") else None,
    )
    named = {*rules.token_ids, *(rules.stop_token_ids or ())}
    if any(token >= limits.vocab_size for token in named):
        raise WireError(f"A token rule names a token outside 0..{limits.vocab_size - 1}.")
    if not math.isfinite(message.decay_factor):
        raise WireError("decay_factor must be a finite number.")
    return rules


def _check_rules(message: pb.TokenRules) -> None:
    """Check the sizes of rules before their values are read."""
    for name in RULE_LISTS:
        _at_most(len(getattr(message, name)), MAX_RULE_TOKENS, "tokens in a token rule")
    _at_most(len(message.bad_words_ids), MAX_WORDS, "forbidden words")
    sizes = [len(word.token_ids) for word in message.bad_words_ids]
    _at_most(max(sizes, default=0), MAX_WORD_TOKENS, "tokens in a forbidden word")
    _at_most(sum(sizes), MAX_WORDS_TOKENS, "tokens in all forbidden words")
    if 0 in sizes:
        raise WireError("A forbidden word has no tokens.")


def sampling_of(message: pb.Sampling, limits: WireLimits) -> SamplingParams:
    """Check sampling parameters; WireError for a value out of range, or sampling without a seed."""
    _at_most(len(message.logit_bias), MAX_LOGIT_BIAS, "tokens in logit_bias")
    if any(token >= limits.vocab_size for token in message.logit_bias):
        raise WireError(f"logit_bias names a token outside 0..{limits.vocab_size - 1}.")
    try:
        sampling = SamplingParams(
            **plain_settings(message),
            seed=message.seed if message.HasField("seed") else None,
            rules=_rules_of(message.rules, limits) if message.HasField("rules") else NO_RULES,
        )
    except InputError as error:
        raise WireError(str(error)) from error
    if len(message.grammar) > MAX_GRAMMAR:
        raise WireError(f"A grammar of {len(message.grammar)} characters; at most {MAX_GRAMMAR}.")
    if sampling.samples and sampling.seed is None:
        raise WireError("Sampling needs a seed; the device draws one where the user gives none.")
    return sampling


def codec_of(number: int) -> CodecName:
    """Find the codec of a message; WireError for an unknown number."""
    if number not in CODEC_NAMES:
        raise WireError(f"Unknown codec number {number}; known: {sorted(CODEC_NAMES)}.")
    return CODEC_NAMES[number]


def refusal(message: str) -> str:
    """What a user is told of a server's refusal."""
    return f"The server refuses: {one_line(message) or 'it does not say why.'}"


def one_line(message: str) -> str:
    """Shorten a server's message to one line of printable characters."""
    text = " ".join(message[:MAX_MESSAGE].split())
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
