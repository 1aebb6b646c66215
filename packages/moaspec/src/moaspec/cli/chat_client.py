"""A client of the endpoints, for `moaspec chat --url`."""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moaspec.http_client import (
    BadAnswerError,
    BlockingLoop,
    HttpClient,
    broken_connection,
    message,
    one_line,
    refusal,
)
from moaspec_core.errors import ServerError

CONNECT_S = 5.0
ABOUT_S = 30.0
EVENT_S = 300.0  # a server that is busy or disconnected may send nothing for minutes
MAX_ABOUT_BYTES = 1 << 18
MAX_EVENT_BYTES = 4 << 20
MAX_STREAM_BYTES = 512 << 20
MAX_EVENTS = 1 << 20
MAX_TEXT = 16 << 20  # characters of an answer

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Part(BaseModel):
    """A part of an answer; unknown fields are left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _About(_Part):
    model: Annotated[str, Field(max_length=1000)]
    mode: Annotated[str, Field(max_length=100)]


class _Delta(_Part):
    content: str | None = None


class _Choice(_Part):
    delta: _Delta


class _Stats(_Part):
    tokens: _Count = 0
    tokens_per_second: float | None = None
    tau: float | None = None


class _Piece(_Part):
    text: str
    source: str
    was: str | None = None


class _Extension(_Part):
    pieces: list[_Piece] | None = None
    provisional: list[_Piece] | None = None
    stats: _Stats | None = None
    correction: dict[str, Any] | None = None


class _Chunk(_Part):
    choices: list[_Choice]
    moaspec: _Extension | None = None


_P = TypeVar("_P", bound=_Part)


class ServedChat:
    """A chat client of `moaspec serve` or `moaspec edge`.

    Args:
        url: base URL, with or without /v1.
        key: API key, if the server requires one.

    Attributes:
        mode: "local" or "edge".

    Raises:
        InputError: no URL, or a proxy that cannot be used.
        ServerError: no moaspec server answers.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._server = HttpClient("--url", url, key, connect_s=CONNECT_S)
        self._loop = BlockingLoop()
        try:
            about = self._loop.run(self._about())
        except BaseException:
            self.close()
            raise
        self.model, self.mode = about.model, about.mode

    def stream(
        self, messages: Sequence[Mapping[str, str]], *, provisional: bool, **settings: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer, with the extension of docs/serve.md.

        Only the fields that `moaspec chat` reads are there; those that are null are left out.

        Args:
            provisional: whether to request unverified text too.
            **settings: further fields of the request.

        Raises:
            ServerError: the request was refused or failed, or the connection broke.
        """
        extension = {"sources": True, "stats": True, "link": True, "provisional": provisional}
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "moaspec": extension,
            **{name: value for name, value in settings.items() if value is not None},
        }
        chunks = self._chunks(body)
        try:
            while (chunk := self._loop.run(anext(chunks, None))) is not None:
                yield chunk
        finally:
            self._loop.run(chunks.aclose())

    def close(self) -> None:
        self._loop.run(self._server.close())
        self._loop.close()

    async def _about(self) -> _About:
        try:
            answer = await self._server.ask("GET", "/v1/moaspec", most=MAX_ABOUT_BYTES, s=ABOUT_S)
            if answer.status_code != httpx.codes.OK:
                raise ServerError(f"{self._server} answered {refusal(answer, answer.content)}")
            return self._parsed(_About, answer.content)
        except (httpx.HTTPError, httpx.InvalidURL, BadAnswerError) as error:
            cause = one_line(str(error)).rstrip(".") or type(error).__name__
            raise ServerError(
                f"No moaspec server answers at {self._server}: {cause}. Is `moaspec serve` running "
                "there?"
            ) from error

    async def _chunks(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield chunks until [DONE]; an error event raises `ServerError`."""
        length = number = 0
        events = self._server.events(
            "/v1/chat/completions",
            body,
            most=MAX_STREAM_BYTES,
            line=MAX_EVENT_BYTES,
            s=EVENT_S,
        )
        with broken_connection(self._server):
            async with aclosing(events):
                async for data in events:
                    chunk, number = self._chunk(data), number + 1
                    length += sum(len(choice.delta.content or "") for choice in chunk.choices)
                    if length > MAX_TEXT or number > MAX_EVENTS:
                        raise BadAnswerError(f"{self._server} does not end its answer.")
                    yield chunk.model_dump(exclude_none=True)

    def _chunk(self, data: bytes) -> _Chunk:
        if b'"error"' in data:
            with suppress(ValueError, RecursionError):
                event = json.loads(data)
                if isinstance(event, dict) and event.get("error"):
                    raise ServerError(f"{self._server} failed: {message(data)}")
        return self._parsed(_Chunk, data)

    def _parsed(self, form: type[_P], data: bytes) -> _P:
        try:
            return form.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = one_line(".".join(map(str, first["loc"]))) or "all of it"
            said = one_line(data[:80].decode(errors="replace"))
            raise BadAnswerError(
                f"{self._server} sends what is no answer of moaspec ({place}: {first['msg']}): "
                f"{said!r}"
            ) from error
