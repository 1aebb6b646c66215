"""A client of OpenAI-compatible servers: vLLM, SGLang, llama.cpp, `moaspec serve`.

It tries again while a server is busy or out of reach. Another refusal concerns one request
(`UnusableAnswerError`) or all requests (`ServerError`).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from moaspec.http_client import (
    BadAnswerError,
    HttpClient,
    SlowAnswerError,
    one_line,
    refusal,
    require_url,
)
from moaspec_core.errors import DataError, InputError, ServerError
from moaspec_core.support.proxies import proxy_for
from moaspec_train.dataset.concurrency import MOST, Concurrency

CONNECT_S, LIST_S, ANSWER_S = 10.0, 60.0, 1800.0
"""An answer may take long: a request may stand in the server's queue behind many others."""
MAX_LIST_BYTES, MAX_ANSWER_BYTES = 4 << 20, 64 << 20
BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""Status codes after which the same request may succeed."""
KEY_REFUSED = frozenset({401, 402, 403})
FOR_ALL = KEY_REFUSED | {404, 405}
"""Status codes that concern every request: the key, the model or the path."""
PATIENCE_S = 300.0  # a request is tried again for this long after it first failed
MAX_DELAY_S = 30.0
MAX_FAULTS = 3
"""Attempts at a request that fails inside the server (500): some servers report refusals so."""
MAX_REFUSED = 20  # successive refused requests after which the run stops
CONTINUE = "Rows that are written stay; run the same command again to continue."


class _Answer(BaseModel, strict=True):
    """A part of an answer; unknown fields are left out."""


class _Model(_Answer):
    id: str
    max_model_len: PositiveInt | None = None


class _Models(_Answer):
    data: list[_Model]


class Usage(_Answer):
    """Tokens that a server has counted; None: it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Piece(_Answer):
    id: int


class _Pieces(_Answer):
    pieces: list[_Piece] = []


class Choice(_Answer):
    """One text of a completion; `token_ids` is vLLM's."""

    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Sources(_Answer):
    choices: list[_Pieces] = []


class Completion(_Answer):
    """An answer of `/v1/completions` with one choice; `moaspec` is ours."""

    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    usage: Usage | None = None
    moaspec: _Sources | None = None

    @property
    def choice(self) -> Choice:
        return self.choices[0]

    @property
    def counted(self) -> Usage:
        return self.usage or Usage()

    @property
    def token_ids(self) -> list[int] | None:
        if self.choice.token_ids is None and self.moaspec and self.moaspec.choices:
            return [piece.id for piece in self.moaspec.choices[0].pieces]
        return self.choice.token_ids


AnswerT = TypeVar("AnswerT", bound=_Answer)


class UnusableAnswerError(DataError):
    """An answer that cannot become a row; its text is one of few reasons, which are counted."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address and key of a server; InputError for a URL that cannot be used."""

    url: str  # base URL, with or without /v1
    model: str | None = None  # the server's name of the model; None: it has only one
    key: str = ""  # API key; "" sends none
    # Before the first repeated attempt; it doubles with each further one. A server may ask for
    # another delay, but not for a shorter one than the first.
    first_delay_s: float = 1.0
    at_once: int | None = None  # requests under way; None: as many as the server answers fastest

    def __post_init__(self) -> None:
        require_url("--endpoint", self.url)
        proxy_for(self.url)


class EndpointClient:
    """Asks one server; used inside an event loop.

    Args:
        tell: called with a line when the server is waited for.

    Attributes:
        pace: the number of requests to have under way; the caller counts them.
    """

    def __init__(self, endpoint: Endpoint, tell: Callable[[str], None]) -> None:
        self._endpoint, self._tell = endpoint, tell
        self._refused, self._told = 0, False
        self.pace = Concurrency(endpoint.at_once)
        self._server = HttpClient(
            "--endpoint",
            endpoint.url,
            endpoint.key,
            connect_s=CONNECT_S,
            connections=endpoint.at_once or MOST,
        )

    def __str__(self) -> str:
        return str(self._server)

    async def close(self) -> None:
        await self._server.close()

    async def model(self, called: str) -> tuple[str, int | None]:
        """The name of the server's model, and its context length if the server reports it.

        Args:
            called: this command's name of the model, which selects one of several.

        Raises:
            ServerError: no server answers.
            InputError: several models, or none of the name that was asked for.
        """
        wanted, none = self._endpoint.model, "none"
        try:
            listed = await self._sent(_Models, "GET", "/v1/models", fatal=KEY_REFUSED)
            models = {one.id: one.max_model_len for one in listed.data}
        except UnusableAnswerError as error:
            models, none = {}, f"{error}"
        if wanted is None:
            found = [called] if called in models else list(models)
            if len(found) != 1:
                names = ", ".join(found[:5]) or none
                raise InputError(
                    f"The server at {self._server} lists these models: {names}. Name the "
                    "one to ask with --endpoint-model."
                )
            wanted = found[0]
        return wanted, models.get(wanted)

    async def complete(self, fields: Mapping[str, Any]) -> Completion:
        """A completion.

        Raises:
            UnusableAnswerError: the server refuses this request.
            ServerError: it refuses all, or cannot be reached.
        """
        try:
            answer = await self._sent(Completion, "POST", "/v1/completions", fields)
        except UnusableAnswerError as error:
            self._refused += 1
            if self._refused >= MAX_REFUSED:
                raise ServerError(
                    f"{MAX_REFUSED} successive requests to {self._server} failed: {error}. "
                    f"{CONTINUE}"
                ) from error
            raise
        self._refused = 0
        return answer

    async def _sent(
        self,
        form: type[AnswerT],
        method: str,
        path: str,
        fields: Mapping[str, Any] | None = None,
        *,
        fatal: Collection[int] = FOR_ALL,
    ) -> AnswerT:
        """An answer, after as many attempts as it takes.

        Raises:
            UnusableAnswerError: this request is refused, or its answer has another form.
            ServerError: the server has not answered for long, or with one of the `fatal` codes.
        """
        least_s = delay_s = self._endpoint.first_delay_s
        failing_since, faults = None, 0
        while True:
            after_s = None
            try:
                answer = await self._answer(method, path, fields)
            except httpx.TransportError as error:
                cause = one_line(str(error)) or type(error).__name__
            else:
                code = answer.status_code
                if code == httpx.codes.OK:
                    return _parsed(form, answer.content)
                cause = refusal(answer, answer.content)
                if code in fatal:
                    raise ServerError(f"{self._server} answers {path} with {cause}")
                faults += code not in BUSY
                if code not in BUSY and (code < 500 or faults >= MAX_FAULTS):
                    raise UnusableAnswerError(f"the server refuses the request with {cause}")
                after_s = _retry_after_s(answer)
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            if now - failing_since > PATIENCE_S:
                raise ServerError(
                    f"{self._server} has not answered for {PATIENCE_S:.0f} s ({cause}). {CONTINUE}"
                )
            self.pace.refused()
            self._tell_waiting(cause)
            await asyncio.sleep(delay_s if after_s is None else max(after_s, least_s))
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _answer(
        self, method: str, path: str, fields: Mapping[str, Any] | None
    ) -> httpx.Response:
        """One attempt.

        Raises:
            UnusableAnswerError: an answer beyond a limit of size.
            ServerError: no answer in time. Another attempt would only add to the server's work.
            httpx.TransportError: no answer.
        """
        most, s = (MAX_LIST_BYTES, LIST_S) if fields is None else (MAX_ANSWER_BYTES, ANSWER_S)
        try:
            return await self._server.ask(method, path, fields, most=most, s=s)
        except SlowAnswerError as error:
            raise ServerError(
                f"{str(error).rstrip('.')}, and the request is not sent again. Ask for fewer "
                f"answers at once (--batch) or shorter ones (--max-new-tokens). {CONTINUE}"
            ) from error
        except BadAnswerError as error:
            raise UnusableAnswerError(str(error)) from error

    def _tell_waiting(self, cause: str) -> None:
        if not self._told:
            self._told = True
            self._tell(f"Waiting for {self._server} ({cause}); requests are repeated.")


def _parsed(form: type[AnswerT], body: bytes) -> AnswerT:
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "all"
        name = form.__name__.strip("_").lower()
        raise UnusableAnswerError(
            f"the server's answer is no {name} ({place}: {first['msg']})"
        ) from error


def _retry_after_s(answer: httpx.Response) -> float | None:
    """The delay that the server asks for, in seconds."""
    said = answer.headers.get("retry-after", "")
    return min(float(said), MAX_DELAY_S) if said.isdecimal() else None
