"""Errors as HTTP responses in OpenAI's format."""

import logging
import sys
from collections.abc import Mapping
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from moaspec_core.errors import BusyError, ContextError, InputError, MoaSpecError
from moaspec_serve.openai.schema import ErrorResponse

LOG = logging.getLogger("moaspec.http_errors")

STATUSES = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503)  # all error statuses of the endpoints

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 429: "busy"}


class RequestError(InputError):
    """A request is invalid.

    Args:
        message: the value received, the expected one and the remedy.
        code: OpenAI's error code, if there is one.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Error in OpenAI's format."""
    kind = _TYPES.get(status, "invalid_request_error")
    code = code or _CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error. Internal errors are logged and not described."""
    if isinstance(error, RequestValidationError):
        error = _readable(error)
    if isinstance(error, RequestError):
        status, code = error.status, error.code
        return status, error_body(status, str(error), param=error.param, code=code)
    if isinstance(error, HTTPException):
        text = _why_unread(error.__cause__) or str(error.detail)
        return error.status_code, error_body(error.status_code, text)
    if isinstance(error, ContextError):
        return 400, error_body(400, str(error), code="context_length_exceeded")
    for kind, status in ((InputError, 400), (BusyError, 429), (MoaSpecError, 503)):
        if isinstance(error, kind):
            return status, error_body(status, str(error))
    LOG.error("A request failed.", exc_info=error)
    return 500, error_body(500, "The server failed; its log says why.")


def install(app: FastAPI) -> None:
    """Register a handler for all errors of an application."""
    for kind in (RequestValidationError, HTTPException, MoaSpecError, Exception):
        app.add_exception_handler(kind, _respond)


def responses() -> dict[int | str, dict[str, Any]]:
    """Error responses for the OpenAPI document."""
    return {status: {"model": ErrorResponse} for status in STATUSES}


async def _respond(request: Request, error: Exception) -> JSONResponse:
    status, content = error_response(error)
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        headers = error.headers
    if isinstance(error, BusyError):
        # Nothing says when a link that broke will be there again, or a server that stops.
        headers = {"Retry-After": str(ceil(error.retry_s))}
    if status == 405 and (methods := _methods(request)):
        headers = {"Allow": methods}
    return JSONResponse(content, status, headers)


def _methods(request: Request) -> str:
    """Methods of the endpoints at a path; the framework names those of the first one only."""
    asked = [{**request.scope, "method": method} for method in ("DELETE", "GET", "POST")]
    routes = request.app.routes
    return ", ".join(
        one["method"] for one in asked if any(r.matches(one)[0] is Match.FULL for r in routes)
    )


def _why_unread(cause: BaseException | None) -> str | None:
    """Why a body could not be parsed; the framework says that it could not."""
    if isinstance(cause, UnicodeDecodeError):
        byte = f"byte {cause.object[cause.start]:#04x} at {cause.start}"
        return f"The body is no text in UTF-8: {byte}. Send JSON in UTF-8, not compressed."
    if isinstance(cause, RecursionError):
        return "The body nests too deeply."
    if isinstance(cause, ValueError):  # Python's limit on the digits of an integer
        return f"The body holds a number of over {sys.get_int_max_str_digits()} digits."
    return None


def _readable(error: RequestValidationError) -> RequestError:
    # A field may have several types. Report the error of the type that matched furthest.
    first: Mapping[str, Any] = max(
        error.errors(),
        key=lambda each: (
            len(each["loc"]),
            each["type"] in ("too_long", "too_short"),
            not each["type"].endswith("_type"),
        ),
    )
    if tuple(first["loc"]) == ("body",) and isinstance(error.body, bytes):
        return RequestError(
            "The body is no JSON object; send one, with Content-Type: application/json."
        )
    param = _field(error.body, first)
    where = f" at {param}" if param else ""
    return RequestError(f"The request is invalid{where}: {first['msg']}.", param=param)


def _field(given: Any, error: Mapping[str, Any]) -> str | None:
    """Path of the invalid field, without the names of our types."""
    names: list[str] = []
    for part in error["loc"][1:]:
        in_list = isinstance(given, list) and isinstance(part, int) and part < len(given)
        if in_list or (isinstance(given, dict) and part in given):
            names.append(str(part))
        else:
            continue
        given = given[part]
    if error["type"] == "missing":
        names.append(str(error["loc"][-1]))
    return ".".join(names) or None
