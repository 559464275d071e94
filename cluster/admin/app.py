"""Control -> its HTTP application: probes and metrics, the admin API, its events, the dashboard's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.routing import Match

from paceline.cluster.admin import document
from paceline.cluster.admin.actions import Actions
from paceline.cluster.admin.api import api_routes
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import Authority, Guard
from paceline.cluster.admin.bundle import Bundle
from paceline.cluster.admin.desk import Desk
from paceline.cluster.admin.events import Feed, event_routes
from paceline.cluster.admin.holdings import Holdings
from paceline.cluster.admin.key import AdminKey
from paceline.cluster.admin.key_desk import KeyDesk, key_routes
from paceline.cluster.admin.problems import answer_of
from paceline.cluster.admin.session_routes import session_routes
from paceline.cluster.admin.settings import Settings
from paceline.cluster.errors import PacelineError
from paceline.cluster.keys import KeyContent, is_loopback

if TYPE_CHECKING:
    from paceline.cluster.control import Control


def build_admin_app(control: Control, key_digest: bytes, *, bundle: Bundle | None = None) -> FastAPI:
    """All of Control's routes behind one guard.

    Args:
        key_digest: of the admin key (`key.hash_key`); empty if there is none, and then nobody gets in.
    """
    config = control.config
    watch = control.keys
    authority = Authority(
        AdminKey(key_digest),
        is_local=is_loopback(config.control.host),
        port=config.control.port,
        keys=watch.file if watch is not None else None,
    )
    desk = Desk(control)
    audit = Audit(lambda: desk.registry)
    settings = Settings(desk, audit)
    holdings = Holdings(desk, control.fresh)
    app = FastAPI(
        title="Paceline control", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_open_routes(app, control)
    app.include_router(session_routes(authority, audit, config.model.name))
    app.include_router(api_routes(desk, Actions(desk, audit), settings, audit, holdings))
    keys = KeyDesk(watch, desk, audit) if watch is not None else None
    if watch is not None and keys is not None:
        app.include_router(key_routes(keys))
        watch.subscribe(lambda content: _end_sessions(authority, content))
    app.include_router(event_routes(Feed(desk, audit, settings, authority, keys=keys)))
    _add_document(app)
    _add_pages(app, bundle or Bundle())
    for kind in (PacelineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Guard, authority=authority, refused=audit.request_refused)
    return app


def _end_sessions(authority: Authority, content: KeyContent) -> None:
    """Of keys that are revoked, or no longer there."""
    valid = {key.id for key in content.keys if key.revoked is None} | {authority.key.id}
    authority.sessions.keep_only(valid.__contains__)


def _add_open_routes(app: FastAPI, control: Control) -> None:
    """What needs no key: all of it on loopback, the probe elsewhere."""

    @app.get("/health", include_in_schema=False)
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        return Response(control.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/admin/api/status", include_in_schema=False)
    async def status() -> dict[str, Any]:
        return control.status()


def _add_document(app: FastAPI) -> None:
    made: list[dict[str, Any]] = []

    @app.get(document.PATH, include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        if not made:
            made.append(document.describe(app))
        return made[0]

    app.openapi = lambda: document.describe(app)  # type: ignore[method-assign]


def _add_pages(app: FastAPI, bundle: Bundle) -> None:
    @app.get("/", include_in_schema=False)
    @app.get("/admin", include_in_schema=False)
    async def to_the_page() -> Response:
        return RedirectResponse("/admin/", 307)

    @app.api_route("/admin/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(path: str, request: Request) -> Response:
        if path == "api" or path.startswith("api/"):
            has_other_methods = any(route.matches(request.scope)[0] is Match.PARTIAL for route in app.routes)
            raise HTTPException(405 if has_other_methods else 404)
        return bundle.answer(request, path)


async def _answer_error(request: Request, error: Exception) -> Response:
    return answer_of(error)
