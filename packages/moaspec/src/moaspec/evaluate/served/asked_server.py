"""A client of any OpenAI-compatible server that asks for greedy texts and their token ids.

Each server has its own fields: vLLM and moaspec return ids (`return_token_ids`), llama.cpp has them
in its own endpoint and beside log-probabilities. The text of others is tokenised again.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from moaspec.evaluate.served.server_speculation import Speculation, read_speculation
from moaspec.http_client import HttpClient, broken_connection, refusal
from moaspec_core.chat.messages import Message
from moaspec_core.errors import InputError, ServerError

CONNECT_S, ABOUT_S, ANSWER_S = 10.0, 60.0, 1800.0
MAX_ABOUT_BYTES, MAX_ANSWER_BYTES = 8 << 20, 64 << 20
CONNECTIONS = 256

Route = Literal["completions", "chat"]
Fields = dict[str, Any]

GREEDY_FIELDS: Mapping[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1.0,  # of vLLM, SGLang and moaspec, against a model's own default
    "seed": 0,
}
OPTIONAL_FIELDS = (
    ("repetition_penalty", "return_token_ids"),
    ("logprobs", "top_logprobs"),
)
"""Fields that some servers refuse, in the order in which they are left out."""

PLAIN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "moaspec": {"moaspec": {"speculation": False}},
}
"""Fields that switch drafts off for one request, by the owner that a server names. (llama.cpp
ignores its own ones: its answers count as many drafts with them.)"""


@dataclass(frozen=True, kw_only=True)
class ServedText:
    """One text of a server.

    Attributes:
        token_ids: of the text; None if the server gives none.
        prompt_ids: that the server names; None if it names none.
        logprobs: of each token, if they were requested; else empty.
        path, fields: the request.
    """

    path: str
    fields: Fields
    text: str
    finish: str
    token_ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    prompt_tokens: int | None
    completion_tokens: int | None
    logprobs: tuple[float, ...]
    speculation: Speculation


class AskedServer:
    """A server and how to ask it; used inside an event loop.

    Args:
        url: base URL, with or without /v1.
        model: the server's name of the model; None: it has only one.
        key: API key; "" sends none.

    Attributes:
        owner: who made the server, as it says itself: "moaspec", "vllm", "llamacpp", ...
    """

    def __init__(self, url: str, model: str | None = None, key: str = "") -> None:
        self._server = HttpClient("URL", url, key, connect_s=CONNECT_S, connections=CONNECTIONS)
        self.model, self.owner, self.about = model or "", "", dict[str, Any]()
        self._left_out: dict[Route, set[str]] = {"completions": set(), "chat": set()}

    def __str__(self) -> str:
        return str(self._server)

    async def close(self) -> None:
        await self._server.close()

    async def meet(self) -> None:
        """Find the model's name and the owner.

        Raises:
            ServerError: no such server answers.
            InputError: it has several models, or not the named one.
        """
        listed = await self._read("GET", "/v1/models")
        entries = listed.get("data")
        models = {
            one["id"]: one
            for one in (entries if isinstance(entries, list) else ())
            if isinstance(one, dict) and isinstance(one.get("id"), str)
        }
        if self.model and models and self.model not in models:
            names = ", ".join(list(models)[:5])
            raise InputError(f"The server at {self} has no model {self.model!r}, but: {names}.")
        if not self.model:
            if not models:
                raise ServerError(f"{self} lists no model; name one with --server-model.")
            owners = {str(one.get("owned_by")) for one in models.values()}
            if len(models) > 1 and owners != {"moaspec"}:  # whose names are all the same model's
                names = ", ".join(list(models)[:5])
                raise InputError(
                    f"The server at {self} lists these models: {names}. Name the one to ask with "
                    "--server-model."
                )
            self.model = next(iter(models))
        self.about = models.get(self.model, {})
        self.owner = str(self.about.get("owned_by") or "")

    @property
    def plain_fields(self) -> Mapping[str, Any] | None:
        """Fields that switch drafts off for one request; None if the server has none."""
        return PLAIN_FIELDS.get(self.owner)

    async def takes_token_ids(self, prompt_ids: Sequence[int]) -> bool:
        """Whether its completions continue exactly these token ids."""
        try:
            answer = await self._probed(
                "completions", lambda: self.complete(prompt_ids, 1, more={"logprobs": 1})
            )
        except ServerError:
            return False
        return answer.prompt_tokens in (None, len(prompt_ids))

    async def prepare_chats(self) -> None:
        """Find which fields chats take; ServerError where there are none."""
        hello: list[Message] = [{"role": "user", "content": "Hello."}]
        await self._probed("chat", lambda: self.chat(hello, 2, more={"logprobs": 1}))

    async def _probed(
        self, route: Route, ask: Callable[[], Coroutine[Any, Any, ServedText]]
    ) -> ServedText:
        """An answer, after leaving out optional fields until the server takes the rest."""
        for more in (*OPTIONAL_FIELDS, ()):
            try:
                return await ask()
            except ServerError:
                if not more:
                    raise
                self._left_out[route].update(more)
        raise AssertionError("the last attempt returns or raises")

    async def complete(
        self, prompt_ids: Sequence[int], max_tokens: int, *, more: Fields | None = None
    ) -> ServedText:
        """Continue token ids greedily.

        Raises:
            ServerError: the server refuses the request or cannot be reached.
        """
        fields = {"model": self.model, "prompt": list(prompt_ids), **GREEDY_FIELDS, **(more or {})}
        if self.owner == "llamacpp":  # only its own endpoint has ids
            probabilities = fields.pop("logprobs", 0)
            own = {"n_predict": max_tokens, "return_tokens": True, "n_probs": probabilities}
            return await self._text("/completion", {**fields, **own})
        own = {"max_tokens": max_tokens, "return_token_ids": True}
        return await self._text("/v1/completions", self._taken("completions", {**fields, **own}))

    async def chat(
        self, messages: Sequence[Message], max_tokens: int, *, more: Fields | None = None
    ) -> ServedText:
        """Answer a conversation greedily; see `complete`."""
        fields = {"model": self.model, "messages": list(messages), **GREEDY_FIELDS, **(more or {})}
        fields |= {"max_tokens": max_tokens, "return_token_ids": True}
        if self.owner == "llamacpp" or "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": 1}
        return await self._text("/v1/chat/completions", self._taken("chat", fields))

    def _taken(self, route: Route, fields: Fields) -> Fields:
        """The fields that this route of the server takes."""
        return {name: fields[name] for name in fields if name not in self._left_out[route]}

    async def _text(self, path: str, fields: Fields) -> ServedText:
        answer = await self._read("POST", path, fields)
        try:
            return (
                _native(path, fields, answer)
                if "tokens" in answer
                else _choice(path, fields, answer)
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self} answers {path} with what is no completion: {json.dumps(answer)[:200]}"
            ) from error

    async def text_of(self, path: str) -> str | None:
        """A page of the server, as `/metrics`; None if it has none."""
        with broken_connection(self._server):
            answer = await self._server.ask("GET", path, most=MAX_ABOUT_BYTES, s=ABOUT_S)
        return answer.text if answer.status_code == httpx.codes.OK else None

    async def _read(self, method: str, path: str, fields: Fields | None = None) -> Fields:
        most, s = (MAX_ABOUT_BYTES, ABOUT_S) if fields is None else (MAX_ANSWER_BYTES, ANSWER_S)
        with broken_connection(self._server):
            answer = await self._server.ask(method, path, fields, most=most, s=s)
        if answer.status_code != httpx.codes.OK:
            raise ServerError(f"{self} answers {path} with {refusal(answer, answer.content)}")
        try:
            found = json.loads(answer.content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self} answers {path} with what is no JSON.") from error
        if not isinstance(found, dict):
            raise ServerError(f"{self} answers {path} with what is no JSON object.")
        return found


async def together(requests: Sequence[Any]) -> list[Any]:
    """The answers of requests that are sent at the same time."""
    return list(await asyncio.gather(*requests))


def _native(path: str, fields: Fields, answer: Fields) -> ServedText:
    """An answer of llama.cpp's own endpoint."""
    tokens = answer["completion_probabilities"] if fields.get("n_probs") else []
    return ServedText(
        path=path,
        fields=fields,
        text=str(answer["content"]),
        finish="length" if answer.get("stop_type") == "limit" else "stop",
        token_ids=tuple(map(int, answer["tokens"])),
        prompt_ids=None,
        prompt_tokens=answer.get("tokens_evaluated"),
        completion_tokens=answer.get("tokens_predicted"),
        logprobs=tuple(float(one["logprob"]) for one in tokens),
        speculation=read_speculation(answer),
    )


def _choice(path: str, fields: Fields, answer: Fields) -> ServedText:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content") or ""
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
    entries = logprobs.get("content") or ()
    if ids is None and entries and all(isinstance(one.get("id"), int) for one in entries):
        ids = [one["id"] for one in entries]
    values = [one["logprob"] for one in entries] or logprobs.get("token_logprobs") or ()
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    return ServedText(
        path=path,
        fields=fields,
        text=str(text),
        finish=str(choice.get("finish_reason") or ""),
        token_ids=None if ids is None else tuple(map(int, ids)),
        prompt_ids=None if prompt_ids is None else tuple(map(int, prompt_ids)),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        logprobs=tuple(map(float, values)),
        speculation=read_speculation(answer),
    )
