"""The HTTP application: endpoints, page, and what stands before them."""

from __future__ import annotations

import importlib.resources
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import moaspec
from moaspec.serve import about
from moaspec.serve import http_errors as failures
from moaspec.serve.guard import HttpGuard
from moaspec.serve.openai import chat_endpoint as chat
from moaspec.serve.openai import completions, responses
from moaspec.serve.server_context import ServerContext, ServeSettings
from moaspec.serve.sources.source import TextSource

EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event, for the OpenAPI document."""

PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes elements only by the page's sanitiser.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
PAGE_HEADERS = (
    (b"content-security-policy", PAGE_POLICY.encode()),
    (b"cache-control", b"no-cache"),
)
"""The page needs nothing from elsewhere, so nothing from elsewhere may be loaded into it. Browsers
ask whether a file has changed, so that an update never mixes old scripts with new ones."""

HEADERS = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)
"""Of every response that says nothing else; refusals and errors are among them."""


def create_app(source: TextSource, settings: ServeSettings | None = None) -> ASGIApp:
    """The application, for uvicorn or any other ASGI server.

    Args:
        source: decodes; started and closed with the application.
        settings: see `ServeSettings`.
    """
    settings = settings or ServeSettings()
    desk = ServerContext(source, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await source.start()
        try:
            yield
        finally:
            await source.close()

    app = FastAPI(
        title="moaspec",
        version=moaspec.__version__,
        description="OpenAI-compatible endpoints over Mixture of Attentions speculative decoding.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    failures.install(app)
    routers = [part.router(desk) for part in (completions, chat, responses, about)]
    for router in routers:
        app.include_router(router)
    app.mount("/", _Page(page_directory(), [one for router in routers for one in router.routes]))
    _describe(app, keys=bool(settings.guarded.api_keys))
    guarded: ASGIApp = HttpGuard(app, settings.guarded)
    if settings.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return with_headers(guarded, HEADERS)


def with_headers(app: ASGIApp, headers: Sequence[tuple[bytes, bytes]]) -> ASGIApp:
    """An application whose responses have these headers, where they have none of that name."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                names = {name.lower() for name, _ in given}
                more = [one for one in headers if one[0] not in names]
                message = {**message, "headers": [*given, *more]}
            await send(message)

        await app(scope, receive, send_more)

    return answer


def page_directory() -> Path:
    """Where the page's files are."""
    return Path(str(importlib.resources.files("moaspec"))) / "serve" / "page"


class _Page:
    """The page's static files: what no endpoint has answered.

    Args:
        directory: of the files.
        endpoints: come first.
    """

    def __init__(self, directory: Path, endpoints: Sequence[BaseRoute]) -> None:
        self._files = with_headers(StaticFiles(directory=directory, html=True), PAGE_HEADERS)
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refuse_other_methods(scope)
        await self._files(scope, receive, send)

    def _refuse_other_methods(self, scope: Scope) -> None:
        """Endpoints exist for other methods than theirs too; paths below /v1 are no files."""
        asked = [route for route in self._endpoints if route.matches(scope)[0] is Match.PARTIAL]
        methods = {name for route in asked for name in getattr(route, "methods", None) or ()}
        if methods:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(methods))})
        if scope["path"].startswith("/v1/"):
            raise HTTPException(404, f"There is no endpoint {scope['path'][:100]}.")


def _describe(app: FastAPI, *, keys: bool) -> None:
    """Make the OpenAPI document say what is true: 400 for bad requests, keys, streams."""
    make = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
                    if keys and path != "/health":
                        operation["security"] = [{"key": []}]
                    _allow_streams(operation)
            if keys:
                scheme = {"type": "http", "scheme": "bearer"}
                document["components"]["securitySchemes"] = {"key": scheme}
        return app.openapi_schema or {}

    app.openapi = describe  # type: ignore[method-assign]  # FastAPI's own way to change it


def _allow_streams(operation: dict[str, Any]) -> None:
    """Endpoints that take `stream` may answer with events."""
    if operation["operationId"].startswith("create_"):
        content = operation["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": EVENT}
