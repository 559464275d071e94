"""The admin key -> a session's cookie and CSRF token; and its end."""

from __future__ import annotations

import math
import time
from importlib.metadata import version

from fastapi import APIRouter, Depends, Request, Response

from paceline.cluster.admin.answers import Session
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import SESSION_PATH, Actor, Authority, address_of
from paceline.cluster.admin.document import check_fields, refusals
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.admin.requests import SignIn
from paceline.cluster.admin.sessions import MAX_AGE_S


def session_routes(authority: Authority, audit: Audit, model: str) -> APIRouter:
    """The routes at /admin/api/session."""
    router = APIRouter(tags=["session"], dependencies=[Depends(check_fields)])

    def answer(actor: Actor) -> Session:
        assert actor.session is not None
        expires = time.time() + authority.sessions.seconds_left(actor.session)
        return Session(
            who=actor.name, csrf=actor.session.csrf, expires=expires, model=model, build=version("paceline")
        )

    @router.post(SESSION_PATH, responses=refusals(401, 403, 422, 429, 503))
    async def sign_in(body: SignIn, request: Request, response: Response) -> Session:
        """Show the admin key and get a session, as a cookie that scripts cannot read."""
        stranger = Actor("nobody", address_of(request.scope))
        try:
            key_id = authority.check_key(body.key, stranger.address)
        except AdminError as error:
            audit.note_refusal(stranger, "sign_in_failed", error)
            raise
        earlier = authority.session_of(request.headers, touch=False)
        if earlier is not None:
            authority.sessions.close(earlier)
        session, cookie = authority.sessions.open(stranger.address, key_id)
        response.set_cookie(
            authority.cookie,
            cookie,
            max_age=math.floor(MAX_AGE_S),
            path=authority.cookie_path,
            secure=not authority.is_local,
            httponly=True,
            samesite="strict",
        )
        actor = Actor(f"session:{session.id}", stranger.address, session)
        audit.note(actor, "sign_in", f"key:{key_id}")
        return answer(actor)

    @router.get(SESSION_PATH, responses=refusals(401, 422))
    async def session(request: Request) -> Session:
        """Whether this browser is signed in, and its CSRF token."""
        actor: Actor | None = request.state.actor
        if actor is None or actor.session is None:
            raise AdminError(
                401, "not_signed_in", "this browser is not signed in", f"POST the admin key to {SESSION_PATH}"
            )
        return answer(actor)

    @router.delete(SESSION_PATH, status_code=204, responses=refusals(401, 403, 422))
    async def sign_out(request: Request, response: Response) -> None:
        """End the session, and the streams of events that were opened with it."""
        actor: Actor = request.state.actor
        if actor.session is None:
            raise AdminError(
                403, "no_session", "the admin key itself cannot be signed out", "end the session it opened"
            )
        authority.sessions.close(actor.session)
        response.delete_cookie(
            authority.cookie,
            path=authority.cookie_path,
            secure=not authority.is_local,
            httponly=True,
            samesite="strict",
        )
        audit.note(actor, "sign_out")

    return router
