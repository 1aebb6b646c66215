"""What the server says of itself: models, health, metrics, its link."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

import moaspec
from moaspec.serve import http_errors
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.schema import About, CutRequest, Health, LinkReport, Model, ModelList
from moaspec.serve.server_context import ServerContext
from moaspec.serve.sources.source import LinkState


def router(desk: ServerContext) -> APIRouter:
    """The endpoints."""
    made = APIRouter(responses=http_errors.responses())

    @made.get("/v1/models")
    async def list_models() -> ModelList:
        """The model, under all its names."""
        names = [name for name in desk.settings.names if name != "*"]
        return ModelList(data=[_model(desk, name) for name in (desk.facts.name, *names)])

    @made.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Model:
        """One model."""
        desk.check_model(name)
        return _model(desk, name)

    @made.get("/health")
    async def health() -> Health:
        """Whether the server works. At the edge it does, whatever the link."""
        return Health()

    @made.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(desk.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @made.get("/v1/moaspec")
    async def about() -> About:
        """What the page shows."""
        return _about(desk)

    @made.post("/v1/moaspec/link")
    async def cut(asked: CutRequest) -> LinkReport:
        """Cut or restore an emulated link."""
        if not desk.source.cut(asked.cut):
            raise RequestError("There is no emulated link here.", code="not_found", status=404)
        link = _link(desk.source.link)
        assert link is not None, "what can be cut is there"
        return link

    return made


def _model(desk: ServerContext, name: str) -> Model:
    return Model(id=name, created=desk.created, owned_by="moaspec")


def _about(desk: ServerContext) -> About:
    facts, load = desk.facts, desk.source.load
    return About(
        version=moaspec.__version__,
        model=facts.name,
        mode=facts.mode,
        speculation=facts.speculates,
        context=facts.max_positions,
        active=load.active,
        waiting=load.waiting,
        link=_link(desk.source.link),
    )


def _link(link: LinkState | None) -> LinkReport | None:
    if link is None:
        return None
    fields: dict[str, Any] = vars(link)
    return LinkReport(**fields)
