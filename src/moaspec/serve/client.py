"""A client of the endpoints, for `moaspec chat --url`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from moaspec.errors import InputError, ServerError
from moaspec.support.ports import require_url

CONNECT_S, READ_S = 5.0, 300.0  # a server that is busy or disconnected may send nothing for minutes


class ServedChat:
    """A chat client of `moaspec serve` or `moaspec edge`.

    Args:
        url: base URL, with or without /v1.
        key: API key, if the server requires one.

    Attributes:
        mode: "local" or "edge".

    Raises:
        InputError: no URL.
        ServerError: no moaspec server answers.
    """

    def __init__(self, url: str, key: str = "") -> None:
        require_url("--url", url)
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        try:
            about = self._about()
        except ServerError:
            self.close()
            raise
        self.model, self.mode = str(about["model"]), str(about["mode"])

    def stream(
        self, messages: Sequence[Mapping[str, str]], *, provisional: bool, **settings: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer, with the extension of docs/serve.md.

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
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                _check(answer)
                yield from _events(answer)
        except UnicodeEncodeError as error:
            raise InputError("The conversation holds text that is no Unicode.") from error
        except httpx.HTTPError as error:
            raise ServerError(f"The connection to {self._http.base_url} broke: {error}.") from error

    def close(self) -> None:
        self._http.close()

    def _about(self) -> dict[str, Any]:
        try:
            answer = self._http.get("/v1/moaspec")
            _check(answer)
            found: dict[str, Any] = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerError(
                f"No moaspec server answers at {self._http.base_url}: {error}. Is `moaspec serve` "
                "running there?"
            ) from error
        return found


def _check(answer: httpx.Response) -> None:
    if answer.status_code == httpx.codes.OK:
        return
    text = answer.read().decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = text[:200]
    raise ServerError(f"The server answered {answer.status_code}: {text}")


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield events until [DONE]; an error event raises `ServerError`."""
    for line in answer.iter_lines():
        if not line.startswith("data: {"):
            continue
        try:
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        except (ValueError, RecursionError) as error:
            raise ServerError(f"The server sent no JSON: {line[:80]!r}.") from error
        if "error" in event:
            raise ServerError(f"The server failed: {event['error']['message']}")
        yield event
