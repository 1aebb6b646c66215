"""Between protobuf messages and our own objects, with a limit on everything that comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from moaspec.drafting.draft_tree import DraftTree
from moaspec.errors import InputError, WireError
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.codec import CodecName
from moaspec.remote.protocol.position_ranges import Run
from moaspec.sampling.params import SamplingParams
from moaspec.support.limits import (
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
from moaspec.target.token_rules import NO_RULES, TokenRules

M = TypeVar("M", bound=Message)

SESSION_BYTES = 16
"""Of a session's name: enough that nobody guesses one."""

MAX_MESSAGE = 500
"""Characters of what a server tells the user."""

CODEC_NUMBERS: dict[CodecName, pb.Codec] = {
    "fp16": pb.CODEC_FP16,
    "int8": pb.CODEC_INT8,
    "int4": pb.CODEC_INT4,
}
CODEC_NAMES: dict[int, CodecName] = {int(number): name for name, number in CODEC_NUMBERS.items()}


@dataclass(frozen=True)
class WireLimits:
    """What a message may hold.

    Attributes:
        vocab_size: token ids are below it.
        max_tokens: longest text.
    """

    vocab_size: int
    max_tokens: int


def parse_client(frame: bytes) -> pb.ClientMessage:
    """A device's message.

    Raises:
        WireError: no such message.
    """
    message = _parse(frame, pb.ClientMessage())
    if len(message.session) != SESSION_BYTES or message.WhichOneof("kind") is None:
        raise WireError(
            f"A message names its session in {SESSION_BYTES} bytes and has one content; got "
            f"{len(message.session)} bytes and {message.WhichOneof('kind')}."
        )
    return message


def parse_server(frame: bytes) -> pb.ServerMessage:
    """A server's message.

    Raises:
        WireError: no such message.
    """
    return _parse(frame, pb.ServerMessage())


def parse_generate(frame: bytes) -> pb.GenerateRequest:
    """A request for text.

    Raises:
        WireError: no such message, or more in it than a request may have.
    """
    request = _parse(frame, pb.GenerateRequest())
    _at_most(len(request.stop), MAX_STOP_STRINGS, "stop strings")
    _at_most(len(request.stop_token_ids), MAX_STOP_TOKENS, "stop tokens")
    _at_most(max(map(len, request.stop), default=0), MAX_STOP_CHARACTERS, "characters to stop at")
    return request


def _at_most(number: int, most: int, what: str) -> None:
    """Raise WireError for more than a request may have."""
    if number > most:
        raise WireError(f"A request has at most {most} {what}; got {number}.")


def _parse(frame: bytes, message: M) -> M:
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
    """Token ids of a message.

    Raises:
        WireError: fewer or more than allowed, or ids outside the vocabulary.
    """
    if not least <= len(ids) <= most:
        raise WireError(f"Expected {least} to {most} token ids, got {len(ids)}.")
    outside = next((one for one in ids if one >= limits.vocab_size), None)
    if outside is not None:
        raise WireError(
            f"Token id {outside} is outside the target's vocabulary (0..{limits.vocab_size - 1})."
        )
    return tuple(ids)


def tree_of(draft: pb.Draft, limits: WireLimits) -> DraftTree:
    """A message's drafts.

    Raises:
        WireError: too many, ids outside the vocabulary, or parents that make no tree.
    """
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
    """Tokens that follow one another."""
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def draft_message(base: int, tree: DraftTree) -> pb.Draft:
    """Drafts as they travel."""
    plain = tree.parents == tuple(range(-1, len(tree.tokens) - 1))
    parents = () if plain else [parent + 1 for parent in tree.parents]
    return pb.Draft(base=base, tokens=tree.tokens, parents=parents)


def runs_of(ranges: Sequence[pb.Range], limits: WireLimits) -> list[Run]:
    """Runs of positions.

    Raises:
        WireError: too many, not ascending, or beyond the longest text.
    """
    if len(ranges) > MAX_RUNS:
        raise WireError(f"At most {MAX_RUNS} runs of positions, got {len(ranges)}.")
    runs = [(one.start, one.stop) for one in ranges]
    ends = [0, *(end for run in runs for end in run)]
    if ends != sorted(ends) or ends[-1] > limits.max_tokens:
        raise WireError(f"Runs of positions must ascend up to {limits.max_tokens}.")
    return runs


def range_messages(runs: Iterable[Run]) -> list[pb.Range]:
    """Runs as they travel; beyond `MAX_RUNS` the later ones are left out."""
    return [pb.Range(start=start, stop=stop) for start, stop in list(runs)[:MAX_RUNS]]


def sampling_message(sampling: SamplingParams) -> pb.Sampling:
    """Settings as they travel.

    Raises:
        InputError: custom processors, which are code and cannot travel; a grammar can.
    """
    grammars = [getattr(one, "grammar", "") for one in sampling.processors]
    if len(grammars) > 1 or "" in grammars:
        raise InputError(
            "logits_processors are functions, and cannot be sent to a server. Use logit_bias and "
            "the penalties instead."
        )
    return pb.Sampling(
        grammar=grammars[0] if grammars else "",
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=sampling.choice,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        rules=_rules_message(sampling.rules) if sampling.rules else None,
    )


def _rules_message(rules: TokenRules) -> pb.TokenRules:
    start, factor = rules.exponential_decay_length_penalty or (None, None)
    return pb.TokenRules(
        no_repeat_ngram_size=rules.no_repeat_ngram_size,
        bad_words_ids=[pb.TokenRules.Word(token_ids=word) for word in rules.bad_words_ids],
        min_length=rules.min_length,
        min_new_tokens=rules.min_new_tokens,
        forced_bos_token_id=rules.forced_bos_token_id,
        forced_eos_token_id=rules.forced_eos_token_id,
        remove_invalid_values=rules.remove_invalid_values,
        decay_start=start,
        decay_factor=factor,
        suppress_tokens=rules.suppress_tokens,
        begin_suppress_tokens=rules.begin_suppress_tokens,
        stop_token_ids=rules.stop_token_ids,
        max_new_tokens=rules.max_new_tokens,
    )


def _rules_of(message: pb.TokenRules, limits: WireLimits) -> TokenRules:
    """Rules of a message.

    Raises:
        WireError: too many, or ids outside the vocabulary.
    """
    _check_rules(message)
    decay = (message.decay_start, message.decay_factor)
    rules = TokenRules(
        no_repeat_ngram_size=message.no_repeat_ngram_size,
        bad_words_ids=tuple(tuple(word.token_ids) for word in message.bad_words_ids),
        min_length=message.min_length,
        min_new_tokens=message.min_new_tokens,
        forced_bos_token_id=(
            message.forced_bos_token_id if message.HasField("forced_bos_token_id") else None
        ),
        forced_eos_token_id=tuple(message.forced_eos_token_id),
        remove_invalid_values=message.remove_invalid_values,
        exponential_decay_length_penalty=decay if message.HasField("decay_factor") else None,
        suppress_tokens=tuple(message.suppress_tokens),
        begin_suppress_tokens=tuple(message.begin_suppress_tokens),
        stop_token_ids=tuple(message.stop_token_ids),
        max_new_tokens=message.max_new_tokens,
    )
    named = {*rules.token_ids, *(rules.stop_token_ids or ())}
    if any(token >= limits.vocab_size for token in named):
        raise WireError(f"A token rule names a token outside 0..{limits.vocab_size - 1}.")
    if not math.isfinite(message.decay_factor):
        raise WireError("decay_factor must be a finite number.")
    return rules


def _check_rules(message: pb.TokenRules) -> None:
    """Refuse rules that are too many, before any of them is read."""
    for listed in (
        message.forced_eos_token_id,
        message.suppress_tokens,
        message.begin_suppress_tokens,
        message.stop_token_ids,
    ):
        _at_most(len(listed), MAX_RULE_TOKENS, "tokens in a token rule")
    _at_most(len(message.bad_words_ids), MAX_WORDS, "forbidden words")
    sizes = [len(word.token_ids) for word in message.bad_words_ids]
    _at_most(max(sizes, default=0), MAX_WORD_TOKENS, "tokens in a forbidden word")
    _at_most(sum(sizes), MAX_WORDS_TOKENS, "tokens in all forbidden words")
    if 0 in sizes:
        raise WireError("A forbidden word has no tokens.")


def sampling_of(message: pb.Sampling, limits: WireLimits) -> SamplingParams:
    """Settings of a message.

    Raises:
        WireError: a value outside its range, or noise without a seed.
    """
    _at_most(len(message.logit_bias), MAX_LOGIT_BIAS, "tokens in logit_bias")
    if any(token >= limits.vocab_size for token in message.logit_bias):
        raise WireError(f"logit_bias names a token outside 0..{limits.vocab_size - 1}.")
    try:
        sampling = SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed if message.HasField("seed") else None,
            choice=message.choice,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            logprobs=message.logprobs,
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
    """A message's codec.

    Raises:
        WireError: none that is known.
    """
    if number not in CODEC_NAMES:
        raise WireError(f"Unknown codec number {number}; known: {sorted(CODEC_NAMES)}.")
    return CODEC_NAMES[number]


def one_line(message: str) -> str:
    """What a server tells the user, without what no line of text holds."""
    text = " ".join(message[:MAX_MESSAGE].split())
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
