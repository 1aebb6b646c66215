"""The HTTP application: endpoints, page, guard and headers."""

import asyncio
import importlib.resources
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import moaspec_core
from moaspec_serve import about, http_errors
from moaspec_serve.guard import HttpGuard
from moaspec_serve.openai import chat_endpoint, completions_endpoint
from moaspec_serve.openai.responses import responses_endpoint
from moaspec_serve.server_context import ServerContext, ServeSettings
from moaspec_serve.sources.source import TextSource

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
        # Text becomes HTML elements only through the page's sanitiser.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
PAGE_HEADERS = {"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
"""Headers of the page. It may load nothing from other origins. Browsers revalidate each file, so an
update never mixes old scripts with new ones."""

HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Default headers of all responses, errors included."""


def create_app(source: TextSource, settings: ServeSettings | None = None) -> ASGIApp:
    """Create the application for an ASGI server; it starts and closes the source."""
    settings = settings or ServeSettings()
    context = ServerContext(source, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(source.info.grammars.prepare)
        await source.start()
        try:
            yield
        finally:
            await source.close()

    app = FastAPI(
        title="moaspec",
        version=moaspec_core.__version__,
        description="OpenAI-compatible endpoints over Mixture of Attentions speculative decoding.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from other origins
        redoc_url=None,
        redirect_slashes=False,
    )
    http_errors.install(app)
    for module in (completions_endpoint, chat_endpoint, responses_endpoint, about):
        app.include_router(module.router(context))
    app.router.default = _page_files()
    _describe(app, keys=bool(settings.guarded.api_keys))
    guarded_app: ASGIApp = HttpGuard(app, settings.guarded)
    if settings.cors_origins:
        guarded_app = CORSMiddleware(
            guarded_app,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return with_headers(guarded_app, HEADERS)


def with_headers(app: ASGIApp, headers: Mapping[str, str]) -> ASGIApp:
    """Wrap an application: add these headers to responses that lack them."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                for name, value in headers.items():
                    sent.setdefault(name, value)
            await send(message)

        await app(scope, receive, send_with_headers)

    return wrapped


def page_directory() -> Path:
    """Directory of the page's files."""
    return Path(str(importlib.resources.files("moaspec_serve"))) / "page"


def _page_files() -> ASGIApp:
    """The page's static files, for requests that no endpoint answers; 404 for all others."""
    files = with_headers(StaticFiles(directory=page_directory(), html=True), PAGE_HEADERS)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS" and scope["raw_path"] == b"*":  # of the server as a whole
            allowed = {"allow": "DELETE, GET, HEAD, OPTIONS, POST"}
            await Response(status_code=204, headers=allowed)(scope, receive, send)
            return
        path = scope["path"]
        if f"{path}/".startswith("/v1/"):
            raise HTTPException(404, f"There is no endpoint {path[:100]}.")
        try:
            if path != "/" and scope["method"] not in ("GET", "HEAD"):
                raise HTTPException(404)
            await files(scope, receive, send)
        except HTTPException as error:
            if error.status_code != 404:
                raise
            text = f"There is no {path[:100]} here. All endpoints are below /v1: let the base URL "
            raise HTTPException(
                404, text + "end in /v1, without a slash before or after."
            ) from error

    return serve


def _describe(app: FastAPI, *, keys: bool) -> None:
    """Correct the OpenAPI document: 400 for bad requests, API keys."""
    make = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
                    if keys and path != "/health":
                        operation["security"] = [{"key": []}]
            if keys:
                scheme = {"type": "http", "scheme": "bearer"}
                document["components"]["securitySchemes"] = {"key": scheme}
        return app.openapi_schema or {}

    app.openapi = describe  # type: ignore[method-assign]  # the documented way to change it
