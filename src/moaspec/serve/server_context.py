"""What all endpoints share: the source, the settings, and how a request becomes jobs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from moaspec.data.messages import MalformedError, Message, normal_messages
from moaspec.data.templates.chat_template import ChatTemplate
from moaspec.errors import ContextError, InputError
from moaspec.generation.options import RowOptions, sampling_params
from moaspec.sampling.params import SamplingParams
from moaspec.serve.guard import Guarded
from moaspec.serve.http_errors import RequestError
from moaspec.serve.metrics import Metrics
from moaspec.serve.openai.hiding import Asked, Hiding, MakeVault
from moaspec.serve.openai.request_texts import RequestTexts
from moaspec.serve.openai.schema import Sampling
from moaspec.serve.sources.preparing import Preparation
from moaspec.serve.sources.source import Job, SourceFacts, TextSource


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How the endpoints behave.

    Attributes:
        names: further names under which the model answers; "*" is any name.
        default_max_tokens: of chats and responses that give no limit.
        cors_origins: web pages of these origins may call the endpoints; "*": all.
        guarded: see `Guarded`.
        send_timeout_s: how long a client may leave its connection full before it is let go.
        make_vault: makes what hides private text of a request; None: nothing leaves this machine.
    """

    names: tuple[str, ...] = ()
    default_max_tokens: int = 1024
    cors_origins: tuple[str, ...] = ()
    guarded: Guarded = field(default_factory=Guarded)
    send_timeout_s: float = 60.0
    make_vault: MakeVault | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """What endpoints ask for under names of their own.

    Attributes:
        max_tokens: at most so many.
        n: choices per prompt.
        logprobs: alternatives to report with log-probabilities; None: no log-probabilities.
        grammar: that the text follows.
        stop: strings that end the text.
    """

    max_tokens: int
    n: int = 1
    logprobs: int | None = None
    grammar: str | None = None
    stop: tuple[str, ...] = ()


class ServerContext:
    """Turns requests into runs.

    Args:
        source: decodes.
        settings: see `ServeSettings`.

    Attributes:
        template: renders conversations.
        preparation: tokenises prompts and compiles grammars.
    """

    def __init__(self, source: TextSource, settings: ServeSettings) -> None:
        self.source, self.settings = source, settings
        self.metrics = Metrics(source)
        self.template = ChatTemplate(source.facts.tokenizer, source.facts.name)
        self.created = created_now()
        self.preparation = Preparation()

    @property
    def facts(self) -> SourceFacts:
        """Of the target."""
        return self.source.facts

    def check_model(self, name: str) -> None:
        """Refuse names of models that are not here."""
        names = (self.facts.name, *self.settings.names)
        if name not in names and "*" not in names:
            raise RequestError(
                f"The model {name!r} does not exist here; this server has {self.facts.name!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def variables(
        self, given: Mapping[str, Any] | None, reasoning_effort: str | None
    ) -> dict[str, Any]:
        """Variables of the chat template.

        Args:
            given: from the client.
            reasoning_effort: OpenAI's, which some templates read.

        Raises:
            RequestError: this template does not.
        """
        if reasoning_effort is None:
            return dict(given or {})
        if "reasoning_effort" not in self.template.source:
            raise RequestError(
                f"The chat template of {self.facts.name} knows no reasoning_effort. Leave it out, "
                "or set the template's own variables in chat_template_kwargs.",
                param="reasoning_effort",
            )
        return {"reasoning_effort": reasoning_effort, **(given or {})}

    def hiding(self) -> Hiding:
        """What hides the private text of one request."""
        longest = self.facts.max_positions * self.facts.longest_token
        return Hiding(self.settings.make_vault, longest)

    def normal(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages of OpenAI's form in the normal one."""
        try:
            return normal_messages(messages)
        except MalformedError as error:
            raise RequestError(f"The conversation cannot be read: {error}") from error

    def prompt(self, asked: Asked, *, with_tools: bool = True, **how: bool) -> list[int]:
        """Token ids of a conversation.

        Args:
            asked: the conversation, tools and variables of the template.
            with_tools: whether the model is told of the tools.
            **how: see `ChatTemplate.ids`.
        """
        template, variables = self.template, asked.variables or {}
        if not template.exists:
            raise InputError(
                f"{self.facts.name} has no chat template, so it holds no conversation; use "
                "/v1/completions."
            )
        try:
            template.check_variables(variables)
        except InputError as error:
            raise RequestError(str(error), param="chat_template_kwargs") from error
        tools = asked.tools if with_tools else ()
        text = template.rendered(asked.messages, tools, variables, **how)
        return self.tokens(text, template.tokenize)

    def tokens(self, text: str, tokenize: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a prompt, which is not tokenised where no tokens of it could fit.

        Raises:
            ContextError: it is too long.
        """
        facts = self.facts
        if len(text) > facts.max_positions * facts.longest_token:
            raise ContextError(
                f"The prompt has {len(text)} characters, which no {facts.max_positions} tokens of "
                "this model hold. Shorten the prompt."
            )
        return tokenize(text)

    def jobs(
        self,
        request: Request,
        asked: Sampling,
        prompts: Iterable[Sequence[int]],
        order: GenerationSpec,
    ) -> list[Job]:
        """A job for every choice of every prompt."""
        sampling = self._sampling(asked, order)
        return [
            Job(
                prompt_ids=tuple(prompt),
                max_new_tokens=self._room(len(prompt), order.max_tokens),
                stop=order.stop,
                sampling=replace(sampling, choice=choice),
                grammar=order.grammar,
                speculation=asked.extension.speculation,
                provisional=asked.extension.provisional,
                tenant=request.state.tenant,
                client=request.state.client,
            )
            for prompt in prompts
            for choice in range(order.n)
        ]

    def run(self, jobs: Sequence[Job], endpoint: str) -> RequestTexts:
        """Begin to decode."""
        return RequestTexts(self.source, jobs, endpoint=endpoint, metrics=self.metrics)

    def _room(self, prompt_length: int, asked: int) -> int:
        """At most what the context has left; prompts beyond it are refused elsewhere."""
        return max(min(asked, self.facts.max_positions - prompt_length), 0)

    def _sampling(self, asked: Sampling, order: GenerationSpec) -> SamplingParams:
        """What is asked for, else the model's defaults, else OpenAI's. Seeds may be negative."""
        defaults = self.facts.defaults
        usual = 1.0 if defaults.temperature is None else defaults.temperature
        options: RowOptions = {
            "temperature": usual if asked.temperature is None else asked.temperature,
            "top_p": asked.top_p,
            "top_k": None if asked.top_k is None else max(asked.top_k, 0),
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "logit_bias": {int(token): bias for token, bias in (asked.logit_bias or {}).items()},
            "seed": None if asked.seed is None else asked.seed % 2**64,
            "logprobs": order.logprobs is not None,
            "top_logprobs": order.logprobs or 0,
        }
        return sampling_params(options, defaults)


def created_now() -> int:
    """Seconds since 1970, as answers carry them."""
    return int(time.time())


def fresh_id(kind: str) -> str:
    """An id that nobody can guess."""
    return f"{kind}-{secrets.token_hex(12)}"
