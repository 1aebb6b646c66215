"""State that all endpoints share, and the conversion of a request into jobs."""

import difflib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice
from typing import Any, cast

import yaml
from fastapi import Request

from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import MalformedError, Message, normal_messages
from moaspec_core.engine.engine import context_message
from moaspec_core.engine.generate_options import GenerateOptions, sampling_params
from moaspec_core.errors import ContextError, InputError
from moaspec_core.sampling.grammar import TRIALS, Grammar
from moaspec_core.sampling.params import SamplingParams
from moaspec_core.support.tasks import LoopTurns
from moaspec_serve.guard import GuardSettings
from moaspec_serve.http_errors import RequestError
from moaspec_serve.metrics import Metrics
from moaspec_serve.openai.chat_input import ChatInput
from moaspec_serve.openai.redaction import MakeVault, RequestRedactor
from moaspec_serve.openai.schema import GenerationRequest
from moaspec_serve.preparation import PreparationPool
from moaspec_serve.sources.source import Job, SourceInfo, TextSource

NEUTRAL: dict[str, list[Any]] = yaml.safe_load(
    files("moaspec_serve.openai").joinpath("unsupported_fields.yaml").read_text("utf-8")
)
"""Unsupported request fields that would change the answer, with values that would not."""
MISSPELT = 0.85
"""How similar, by `difflib`'s ratio, an unknown field is to a known one that it misspells."""
MAX_COMPARED, MAX_NAME = 50, 40
"""Most unknown fields of a request that are compared so, and most characters of one: all other
requests wait meanwhile."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of the endpoints."""

    names: tuple[str, ...] = ()  # further names of the model; "*" accepts any name
    default_max_tokens: int = 1024  # limit of chats and responses that set none
    # Origins of web pages that may call the endpoints; "*" accepts all.
    cors_origins: tuple[str, ...] = ()
    guarded: GuardSettings = field(default_factory=GuardSettings)
    send_timeout_s: float = 60.0  # maximum time that a client may leave its connection full
    # Makes the vault of a request's private text; None if text stays on this machine.
    make_vault: MakeVault | None = None


class ServerContext:
    """State that all endpoints share.

    Attributes:
        created: start time, seconds since 1970.
        preparation: threads that tokenise prompts.
        compilation: threads that compile grammars, so that no prompt waits for one.
        turns: of the event loop, which answers take when a step has written for many.
    """

    def __init__(self, source: TextSource, settings: ServeSettings) -> None:
        self.source, self.settings = source, settings
        self.metrics = Metrics(source)
        self.template = ChatTemplate(source.info.tokenizer, source.info.name)
        self.created = int(time.time())
        self.preparation = PreparationPool(source.info.places)
        self.compilation = PreparationPool(source.info.places, threads=TRIALS)
        self.turns = LoopTurns()

    @property
    def info(self) -> SourceInfo:
        return self.source.info

    def check(self, body: GenerationRequest) -> None:
        """Refuse other models, and fields that are misspelt or would change the answer."""
        self.check_model(body.model)
        extra = body.model_extra or {}
        for name in islice((one for one in extra if one not in NEUTRAL), MAX_COMPARED):
            if meant := _field_like(name, type(body).model_fields):
                raise RequestError(
                    f"There is no field {name!r}; the nearest is {meant!r}.", param=name
                )
        for name, value in extra.items():
            if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
                raise RequestError(
                    f"The field {name!r} is not supported at this endpoint, and it would change "
                    "the answer. Leave it out.",
                    param=name,
                )

    def check_model(self, name: str) -> None:
        names = (self.info.name, *self.settings.names)
        if name not in names and "*" not in names:
            raise RequestError(
                f"The model {name!r} does not exist here; this server has {self.info.name!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def variables(
        self, given: Mapping[str, Any] | None, reasoning_effort: str | None
    ) -> dict[str, Any]:
        """Variables of the chat template: those of the client, and the effort if it is read.

        Raises:
            RequestError: this template reads no effort.
        """
        if reasoning_effort is None:
            return dict(given or {})
        if "reasoning_effort" not in self.template.source:
            raise RequestError(
                f"The chat template of {self.info.name} knows no reasoning_effort. Leave it out, "
                "or set the template's own variables in chat_template_kwargs.",
                param="reasoning_effort",
            )
        return {"reasoning_effort": reasoning_effort, **(given or {})}

    @property
    def max_characters(self) -> int:
        """Upper bound of the characters that fit into the context."""
        return self.info.target.max_positions * self.info.longest_token

    def redactor(self) -> RequestRedactor:
        positions = self.info.target.max_positions
        return RequestRedactor(self.settings.make_vault, self.max_characters, positions)

    def normal(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        try:
            return normal_messages(messages)
        except MalformedError as error:
            raise RequestError(f"The conversation cannot be read: {error}") from error

    def prompt(self, chat: ChatInput) -> list[int]:
        template, variables = self.template, chat.variables or {}
        if not template.exists:
            raise InputError(
                f"{self.info.name} has no chat template, so it holds no conversation; use "
                "/v1/completions, or give it one (moaspec serve --chat-template FILE)."
            )
        try:
            template.check_variables(variables)
        except InputError as error:
            raise RequestError(str(error), param="chat_template_kwargs") from error
        tools = () if chat.choice == "none" else chat.tools
        text = template.rendered(chat.messages, tools, variables, **chat.template_options)
        return self.tokens(text, template.tokenize)

    def tokens(self, text: str, tokenize: Callable[[str], list[int]]) -> list[int]:
        """Tokenise a prompt; ContextError where its length shows that it cannot fit."""
        if len(text) > self.max_characters:
            positions = self.info.target.max_positions
            raise ContextError(
                context_message(positions, f"your prompt has {len(text)} characters")
                + "No tokens of this model hold so many. Shorten the prompt."
            )
        return tokenize(text)

    async def compiled(self, request: Request, text: str | None) -> Grammar | None:
        """Compile a grammar in a thread; None for none.

        Raises:
            InputError: it cannot be compiled, or takes too much time or memory.
            BusyError: too many grammars of this client wait.
        """
        if text is None:
            return None
        grammars = self.info.grammars
        known = grammars.known(text)
        return known or await self.compilation.run(request, lambda: grammars.compiled(text))

    def jobs(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Iterable[Sequence[int]],
        *,
        max_tokens: int,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        stop: tuple[str, ...] = (),
    ) -> list[Job]:
        """A job for every choice of every prompt.

        Args:
            max_tokens: limit of each choice, besides the rest of the context.
            logprobs: number of alternatives to report; None reports no log-probabilities.

        Raises:
            RequestError: `ignore_eos` with a grammar, whose texts end.
        """
        if body.ignore_eos and grammar is not None:
            raise RequestError(
                "ignore_eos goes on behind the end of a text, where response_format and tools "
                "allow nothing. Leave one of them out.",
                param="ignore_eos",
            )
        sampling, name = self._sampling(body, logprobs), fresh_id("request")
        return [
            Job(
                prompt_ids=tuple(prompt),
                # Longer prompts are refused later.
                max_new_tokens=max(
                    min(max_tokens, self.info.target.max_positions - len(prompt)), 0
                ),
                stop=stop,
                sampling=replace(sampling, choice=choice),
                grammar=grammar,
                ignore_eos=bool(body.ignore_eos),
                speculation=body.extension.speculation,
                provisional=body.extension.provisional,
                tenant=request.state.tenant,
                client=request.state.client,
                request=name,
                priority=body.priority or 0,
            )
            for prompt in prompts
            for choice in range(body.num_choices)
        ]

    def max_tokens(
        self, body: GenerationRequest, given: int | None, default: int | None = None
    ) -> int:
        """Limit of the generated tokens; RequestError for one below `min_tokens`."""
        least, default = body.min_tokens or 0, default or self.settings.default_max_tokens
        if given is not None and given < least:
            raise RequestError(
                f"min_tokens is {least}, and the limit of tokens {given}. Set a limit of at least "
                "min_tokens.",
                param="min_tokens",
            )
        return max(default, least) if given is None else given

    def _sampling(self, body: GenerationRequest, logprobs: int | None) -> SamplingParams:
        """Sampling parameters: the request's, else the model's defaults, else OpenAI's."""
        defaults = self.info.defaults
        default_temperature = 1.0 if defaults.temperature is None else defaults.temperature
        shared = GenerationRequest.model_fields.keys() & GenerateOptions.__annotations__.keys()
        given = {name: getattr(body, name) for name in shared}
        temperature, top_k, seed = (given[name] for name in ("temperature", "top_k", "seed"))
        options = {
            **given,
            "temperature": default_temperature if temperature is None else temperature,
            "top_k": None if top_k is None else max(top_k, 0),
            "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
            "seed": None if seed is None else seed % 2**64,  # it may be negative
            "logprobs": logprobs is not None,
            "top_logprobs": logprobs or 0,
        }
        sampling = sampling_params(cast("GenerateOptions", options), defaults)
        if body.min_tokens is None:
            return sampling
        return replace(sampling, rules=replace(sampling.rules, min_new_tokens=body.min_tokens))


def fresh_id(kind: str) -> str:
    """A random id with a prefix."""
    return f"{kind}-{secrets.token_hex(12)}"


def _field_like(name: str, fields: Iterable[str]) -> str | None:
    """The field that an unknown name misspells or writes in camel case, if it does."""
    if len(name) > MAX_NAME:
        return None
    return next(iter(difflib.get_close_matches(name.lower(), fields, 1, MISSPELT)), None)
