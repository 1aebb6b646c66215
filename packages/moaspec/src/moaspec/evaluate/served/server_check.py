"""Whether a server writes the model's own text: alone, in batches, with drafts and without.

Each prompt is asked for in several ways ("legs"). The first one is alone and with a cold prefix;
the others are compared with it, so that what batches or drafts change is told apart from what the
server's arithmetic changes.
"""

import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice
from statistics import median
from typing import Any, Literal

from moaspec.evaluate.correctness.equality import first_difference
from moaspec.evaluate.served.asked_server import AskedServer, Route, ServedText, together
from moaspec.evaluate.served.judged_text import NOT_TOLD, Judged, TextJudge
from moaspec.evaluate.served.server_speculation import Speculation, read_counters
from moaspec_core.errors import ServerError

NUMBERS_APART = 4.0
"""How many times further than rounding the server's log-probabilities are from float32's, in the
median, where its weights are others. (Of SmolLM2: llama.cpp, which rounds activations to 8 bits, is
at 1.5 to 1.9 with the same GGUF; weights rounded to 4 bits are at 20, to 8 bits at 1.0.)"""

MOST_CERTAIN = 0.05  # share of tokens whose log-probability may round to 0
FLOAT32_APART = 1e-4
"""Distance of two sums in float32 in another order, in nats."""

Verdict = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True)
class AskedPrompt:
    """One prompt: as a conversation, and as the token ids of the reference's chat template."""

    question: str
    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Leg:
    """One way to ask for all prompts."""

    name: str
    route: Route = "completions"
    width: int = 1  # requests at the same time
    drafts: bool = True  # False: switched off per request
    logprobs: bool = False


@dataclass(frozen=True)
class CheckedAnswer:
    """One judged text of a leg."""

    leg: Leg
    prompt: int
    text: ServedText
    judged: Judged

    @property
    def shown(self) -> tuple[Any, ...]:
        """The text as legs are compared by: ids, else characters."""
        return (self.text.text,) if self.text.token_ids is None else self.text.token_ids


@dataclass(frozen=True)
class LegResult:
    """Counts of one leg; a "parted" text differs from the first leg's of the same prompt."""

    leg: Leg
    texts: int
    tokens: int
    right: int
    ties: int
    wrong: int
    unjudged_texts: int
    parted: int
    newly_wrong: int  # texts that are wrong where the first leg's is right
    newly_right: int  # and the other way round
    speculation: Speculation

    @property
    def sign_test(self) -> float | None:
        """Two-sided p of a sign test: are texts wrong here that are right in the first leg?"""
        number, least = self.newly_wrong + self.newly_right, min(self.newly_wrong, self.newly_right)
        if not number:
            return None
        tail = sum(math.comb(number, index) for index in range(least + 1)) / 2**number
        return min(1.0, 2 * tail)


@dataclass
class ServerCheck:
    """A check of one server.

    Args:
        judge: of the reference's target.
        prompts: to ask for.
        widths: numbers of requests at the same time; 1 is always first.
        has_template: whether conversations can be judged.
    """

    server: AskedServer
    judge: TextJudge
    prompts: Sequence[AskedPrompt]
    widths: Sequence[int] = (1, 4, 16)
    has_template: bool = True
    answers: list[CheckedAnswer] = field(default_factory=list)
    counted: dict[Leg, Speculation] = field(default_factory=dict)  # by the server's /metrics

    async def legs(self) -> list[Leg]:
        """The legs that this server allows; the first one is the baseline.

        Raises:
            ServerError: it allows none.
        """
        takes_ids = await self.server.takes_token_ids(self.prompts[0].prompt_ids)
        if not takes_ids and not self.has_template:
            raise ServerError(
                f"{self.server} takes no token ids at /v1/completions, and the model has no chat "
                "template for /v1/chat/completions."
            )
        if self.has_template:
            await self.server.prepare_chats()
        route: Route = "completions" if takes_ids else "chat"
        wide = [width for width in sorted(set(self.widths)) if width > 1]
        legs = [Leg("alone, cold", route, logprobs=True), Leg("alone, again", route)]
        legs += [Leg(f"{width} at once", route, width) for width in wide]
        if self.server.plain_fields is not None:
            legs.append(Leg("alone, no drafts", route, drafts=False))
            legs += [
                Leg(f"{width} at once, no drafts", route, width, drafts=False)
                for width in wide[-1:]
            ]
        if takes_ids and self.has_template:
            legs.append(Leg("chat, alone", "chat", logprobs=True))
        return legs

    def num_texts(self, legs: Iterable[Leg]) -> int:
        return sum(max(leg.width, len(self.prompts)) for leg in legs)

    async def run(self, legs: Sequence[Leg]) -> AsyncIterator[CheckedAnswer]:
        """Ask and judge; `answers` keeps what is yielded."""
        for leg in legs:
            before = await self._counters()
            rows = list(islice(cycle(range(len(self.prompts))), max(leg.width, len(self.prompts))))
            for start in range(0, len(rows), leg.width):
                group = rows[start : start + leg.width]
                texts = await together([self._ask(leg, row) for row in group])
                for row, text in zip(group, texts, strict=True):
                    prompt = self.prompts[row]
                    judged = self.judge.judge(prompt.prompt_ids, text, prompt.max_tokens)
                    self.answers.append(CheckedAnswer(leg, row, text, judged))
                    yield self.answers[-1]
            self.counted[leg] = await self._counters() - before

    async def _counters(self) -> Speculation:
        return read_counters(await self.server.text_of("/metrics") or "")

    async def _ask(self, leg: Leg, row: int) -> ServedText:
        prompt, more = self.prompts[row], dict[str, Any]()
        if not leg.drafts:
            more |= self.server.plain_fields or {}
        if leg.logprobs:
            more["logprobs"] = 1
        if leg.route == "completions":
            return await self.server.complete(prompt.prompt_ids, prompt.max_tokens, more=more)
        messages = [{"role": "user", "content": prompt.question}]
        return await self.server.chat(messages, prompt.max_tokens, more=more)

    @cached_property
    def result(self) -> "ServerResult":
        """What the answers so far say."""
        return ServerResult(self.answers, self.prompts, self.counted)


class ServerResult:
    """Statistics, causes and the verdict of checked answers."""

    def __init__(
        self,
        answers: Sequence[CheckedAnswer],
        prompts: Sequence[AskedPrompt],
        counted: Mapping[Leg, Speculation],
    ) -> None:
        self._prompts, self._counted = prompts, counted
        self.numbers = _numbers(answers)
        # A server in another dtype than the reference, or of rounded activations, may round more.
        self.scale = 1.0
        if self.numbers is not None and not self.other_weights:
            server, rounding = self.numbers
            self.scale = max(1.0, server / max(rounding, FLOAT32_APART))
        self.answers = [
            replace(one, judged=replace(one.judged, limit=one.judged.limit * self.scale))
            for one in answers
        ]
        answers = self.answers
        self._base = {one.prompt: one for one in answers if one.leg == answers[0].leg}

    @cached_property
    def legs(self) -> list[LegResult]:
        legs = dict.fromkeys(one.leg for one in self.answers)
        return [self._leg(leg) for leg in legs]

    def _leg(self, leg: Leg) -> LegResult:
        own = [one for one in self.answers if one.leg == leg]
        judged = [one.judged for one in own]
        base = [self._base[one.prompt] for one in own if one.prompt in self._base]
        pairs = list(zip(own, base, strict=False))
        told = sum((one.text.speculation for one in own), Speculation())
        wrong = [(bool(one.judged.num_wrong), bool(two.judged.num_wrong)) for one, two in pairs]
        return LegResult(
            leg,
            texts=len(own),
            tokens=sum(len(one.gaps) for one in judged),
            right=sum(one.num_right for one in judged),
            ties=sum(one.num_ties for one in judged),
            wrong=sum(one.num_wrong for one in judged),
            unjudged_texts=sum(bool(one.unsure) for one in judged),
            parted=sum(first_difference(one.shown, two.shown) is not None for one, two in pairs),
            newly_wrong=wrong.count((True, False)),
            newly_right=wrong.count((False, True)),
            speculation=told if told.drafted else self._counted.get(leg, told),
        )

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.legs)

    @property
    def wrong(self) -> int:
        return sum(one.wrong for one in self.legs)

    @property
    def faults(self) -> list[CheckedAnswer]:
        return [one for one in self.answers if one.judged.num_wrong]

    @property
    def other_weights(self) -> bool:
        """Whether the server's numbers are not those of the reference's weights."""
        if self.numbers is None:
            return False
        server, rounding = self.numbers
        return server > NUMBERS_APART * max(rounding, FLOAT32_APART)

    @cached_property
    def verdict(self) -> Verdict:
        if not self.tokens:
            return "unknown"
        if not self.wrong:
            return "right"
        return "unknown" if self.other_weights and not self._only_chat_is_wrong else "wrong"

    @property
    def _only_chat_is_wrong(self) -> bool:
        routes = {one.leg.route for one in self.answers}
        return len(routes) > 1 and all(one.leg.route == "chat" for one in self.faults)

    @cached_property
    def causes(self) -> list[str]:
        """Notes on the server, and conditions of the faults; one sentence each."""
        faults = self._fault_causes() if self.wrong else ()
        return [*self._notes(), *self._prompt_causes(), *faults]

    def _notes(self) -> Iterable[str]:
        values = [value for one in self.answers for value in one.text.logprobs]
        untold = values.count(NOT_TOLD)
        if untold > MOST_CERTAIN * len(values):
            yield (
                f"{untold} of its {len(values)} log-probabilities are exactly 0, as llama.cpp "
                "gives for accepted drafts: they are not the model's, and are left out here."
            )
        for leg in self.legs:
            if not leg.leg.drafts and leg.speculation.drafted:
                yield f"{leg.leg.name}: it drafted all the same; its switch had no effect."

    def _prompt_causes(self) -> Iterable[str]:
        for one in self.answers:
            own, text = self._prompts[one.prompt].prompt_ids, one.text
            if text.prompt_ids not in (None, own):
                place = first_difference(own, text.prompt_ids or ())
                yield (
                    f"It reads another prompt: prompt {one.prompt} ({one.leg.name}) differs from "
                    f"the reference's at token {place}. Its chat template or tokenizer is another "
                    "one."
                )
                return
            if text.prompt_ids is None and text.prompt_tokens not in (None, len(own)):
                yield (
                    f"It reads another prompt: prompt {one.prompt} ({one.leg.name}) has "
                    f"{text.prompt_tokens} tokens there and {len(own)} by the reference. Its chat "
                    "template or tokenizer is another one."
                )
                return

    def _fault_causes(self) -> Iterable[str]:
        first, *others = self.legs
        repeated = next((one for one in others if one.leg.name == "alone, again"), None)
        if self.other_weights:
            server, rounding = self.numbers or (0.0, 0.0)
            yield (
                f"Its log-probabilities are {server:.2g} nats from the reference's in the median, "
                f"where rounding gives {rounding:.2g}: its weights are others (quantised, adapted, "
                "or another model), or its prompt is. Its choices cannot be judged by this "
                "reference; give --model the same file (for llama.cpp the same GGUF)."
            )
        elif self.numbers is not None and first.wrong:
            server, rounding = self.numbers
            yield (
                f"Its own log-probabilities agree with the reference's ({server:.2g} nats apart "
                f"in the median, rounding {rounding:.2g}): it computes this model, and chooses "
                "wrongly."
            )
        if repeated is not None and repeated.parted and (first.wrong or repeated.wrong):
            yield (
                f"It does not repeat itself: {repeated.parted} of {repeated.texts} texts change "
                "when the same request is sent again, alone. It samples, or its cache changes the "
                "text."
            )
        if first.wrong:
            yield (
                f"{first.wrong} of {first.tokens} tokens are wrong already when each request is "
                "alone: neither batches nor a warm cache cause these."
            )
        for leg in others:
            if leg.newly_wrong:
                yield (
                    f"{leg.leg.name}: {leg.newly_wrong} of {leg.texts} texts are wrong that are "
                    f"right alone, {leg.newly_right} the other way round (sign test: p = "
                    f"{leg.sign_test:.2g})."
                )
        if self._only_chat_is_wrong:
            yield (
                "Only chats are wrong, and the same prompts as token ids are right: the server's "
                "chat template or its defaults for chats are others."
            )

    def bound(self) -> float | None:
        """Upper 95% bound of the rate of wrong tokens where none was found."""
        return 3 / self.tokens if self.tokens and not self.wrong else None


def _numbers(answers: Sequence[CheckedAnswer]) -> tuple[float, float] | None:
    """Median distances from float32's log-probabilities: the server's, and the rounding's."""
    told = [one.judged for one in answers if one.judged.numbers_apart]
    # A chat may have another prompt than the reference's.
    routes = {one.leg.route for one in answers if one.judged.numbers_apart}
    if len(routes) > 1:
        told = [one.judged for one in answers if one.leg == answers[0].leg]
    if not told:
        return None
    both = [
        [value for one in told for value in getattr(one, name)]
        for name in ("numbers_apart", "rounding_apart")
    ]
    return (median(both[0]), median(both[1])) if both[0] else None


def told_of(answer: CheckedAnswer) -> str:
    """One line about a fault."""
    judged, first = answer.judged, answer.judged.first_wrong
    where = f"{answer.leg.name}; prompt {answer.prompt}, token {first}"
    if judged.wrong_end and first == len(judged.gaps):
        return f"{where}: {judged.wrong_end}"
    assert first is not None, "the answer is a fault"
    what = (
        f"token {judged.token_ids[first]} is not the model's choice"
        if first < len(judged.token_ids)
        else "it stops where the model goes on"
    )
    return (
        f"{where}: {what}, {judged.gaps[first]:.3g} logits off (rounding: up to {judged.limit:.3g})"
    )


def request_line(url: str, answer: CheckedAnswer) -> str:
    """A command that repeats the request of an answer."""
    body = json.dumps(answer.text.fields).replace("'", "'\\''")
    head = "-H 'Content-Type: application/json'"
    return f"curl -s {url}{answer.text.path} {head} -d '{body}'"
