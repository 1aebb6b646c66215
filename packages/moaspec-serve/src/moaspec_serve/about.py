"""Endpoints that describe the server: models, health, metrics, state and link."""

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

import moaspec_core
from moaspec_serve import http_errors
from moaspec_serve.http_errors import RequestError
from moaspec_serve.openai.schema import About, CutRequest
from moaspec_serve.server_context import ServerContext
from moaspec_serve.sources.source import LinkState


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoints."""
    routes = APIRouter(responses=http_errors.responses())

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the model under all its names."""
        names = [name for name in context.settings.names if name != "*"]
        models = [_model(context, name) for name in (context.info.name, *names)]
        return {"object": "list", "data": models}

    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """Describe the model of a name."""
        context.check_model(name)
        return _model(context, name)

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server works. At the edge, the link's state does not matter."""
        return {"status": "ok"}

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Report metrics for Prometheus."""
        return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/moaspec")
    async def about() -> About:
        """Describe the server for the page."""
        info, load = context.info, context.source.load
        return About(
            version=moaspec_core.__version__,
            model=info.name,
            mode=info.mode,
            speculation=info.speculates,
            context=info.target.max_positions,
            active=load.active,
            waiting=load.waiting,
            link=context.source.link,
        )

    @routes.post("/v1/moaspec/link")
    async def cut(body: CutRequest) -> LinkState:
        """Cut or restore an emulated link."""
        if not context.source.cut(body.cut):
            raise RequestError("There is no emulated link here.", code="not_found", status=404)
        assert context.source.link is not None, "a link that was cut exists"
        return context.source.link

    return routes


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": context.created, "owned_by": "moaspec"}
