"""The routes of the public door.

::

    /v1/chat/completions  /v1/completions  /v1/models          nobody's record
    /episodes/{id}/v1/…                                        the same, for the record of an episode
    POST /episodes   POST /episodes/{id}/finish   DELETE /episodes/{id}
    /versions  /health  /metrics

Owns HTTP: which page is where, and how long a client is waited for. What is said is `Conversations`' business, who may
come in `entry.py`'s, what a body must be that of `bodies.py` and `schemas.py`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from headrace.platform.contracts import Answered, Asked, Conversations, OpenedEpisode, RefusalCode
from headrace.platform.contracts.doors import REWARD_NAMES
from headrace.platform.errors import DoorRefused, HeadraceError
from headrace.platform.records.message import Message
from headrace.serving.openai.bodies import read_body, read_json
from headrace.serving.openai.entry import Entry
from headrace.serving.openai.metrics import CONTENT_TYPE, DoorMetrics
from headrace.serving.openai.reading import asked_chat, asked_text
from headrace.serving.openai.refusals import body_of, error_body, error_response, refused
from headrace.serving.openai.schemas import AbandonRequest, ChatRequest, OpenRequest, TextRequest
from headrace.serving.openai.writing import (
    KEEP_ALIVE,
    chat_answer,
    chat_events,
    error_event,
    text_answer,
    text_events,
)

_log = logging.getLogger(__name__)
_FIRST_S = 2.0  # a stream's errors within this time are statuses; later ones are events
_KEEP_ALIVE_S = 10.0
_CLIENT_LEFT = 499  # nobody reads it but the counts
_GONE = "the client that took it had left"
T = TypeVar("T")


class _Door:
    """What the routes share."""

    def __init__(self, conversations: Conversations, entry: Entry, metrics: DoorMetrics) -> None:
        self.conversations, self.entry, self.metrics = conversations, entry, metrics

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        body = await read_body(request, ChatRequest)
        asked = asked_chat(body, *_retry(request))
        return await self._answered(
            request, asked, body.stream, lambda a: chat_answer(body, a), lambda a: chat_events(body, a)
        )

    async def text(self, request: Request) -> Response:
        """`/v1/completions`."""
        body = await read_body(request, TextRequest)
        asked = asked_text(body, *_retry(request))
        return await self._answered(
            request, asked, body.stream, lambda a: text_answer(body, a), lambda a: text_events(body, a)
        )

    async def _answered(
        self,
        request: Request,
        asked: Asked,
        is_stream: bool,
        whole: Callable[[Answered], dict[str, Any]],
        events: Callable[[Answered], Iterator[str]],
    ) -> Response:
        episode = request.path_params.get("episode", "")
        answering = asyncio.ensure_future(self.conversations.answer(asked, episode))
        if not await _while_there(request, answering, _FIRST_S if is_stream else None):
            return StreamingResponse(self._late(answering, events), media_type="text/event-stream")
        answer = answering.result()
        self.metrics.answered(answer)
        if is_stream:
            return StreamingResponse(_each(events(answer)), media_type="text/event-stream")
        return JSONResponse(whole(answer))

    async def _late(
        self, answering: asyncio.Future[Answered], events: Callable[[Answered], Iterator[str]]
    ) -> AsyncIterator[str]:
        """Signs of life until the answer is there."""
        try:
            while not answering.done():
                yield KEEP_ALIVE
                await asyncio.wait({answering}, timeout=_KEEP_ALIVE_S)
            try:
                answer = answering.result()
            except Exception as error:  # the stream has begun: it can be told in there only
                yield error_event(body_of(error))
                return
            self.metrics.answered(answer)
            for event in events(answer):
                yield event
        finally:
            answering.cancel()

    async def models(self) -> dict[str, Any]:
        """`/v1/models`: the policy, which is its newest version, and every version."""
        state = self.conversations.state()
        names = [state.model, *(f"{state.model}@v{number}" for number in reversed(state.versions))]
        held = [{"id": name, "object": "model", "created": 0, "owned_by": "headrace"} for name in names]
        return {"object": "list", "data": held if state.versions else []}

    async def versions(self) -> dict[str, Any]:
        """`/versions`."""
        state = self.conversations.state()
        return {
            "model": state.model,
            "versions": list(state.versions),
            "newest": state.newest,
            "draining": state.draining,
        }

    async def health(self) -> JSONResponse:
        """`/health`: 200 only while a committed version can be sampled from."""
        state = self.conversations.state()
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        if state.newest is None:
            return JSONResponse({"status": "no version"}, 503)
        return JSONResponse({"status": "ok", "newest": state.newest})

    async def page(self) -> Response:
        """`/metrics`."""
        return Response(self.metrics.page(self.conversations.state()), media_type=CONTENT_TYPE)

    async def open(self, request: Request) -> JSONResponse:
        """`POST /episodes`: the episode that has been waiting longest."""
        body = await read_body(request, OpenRequest, may_be_empty=True)
        opened = await self._opened(request, body.wait_s)
        url = str(request.base_url).rstrip("/") + f"/episodes/{opened.episode}"
        answer = {
            "id": opened.episode,
            "base_url": f"{url}/v1",
            "model": self.conversations.state().model,
            "task": {"messages": [_shown(each) for each in opened.messages], "metadata": dict(opened.metadata)},
            "deadline_s": opened.deadline_s,
            "max_turns": opened.max_turns,
            "max_tokens": opened.max_tokens,
        }
        return JSONResponse(answer, 201)

    async def _opened(self, request: Request, wait_s: float) -> OpenedEpisode:
        """The same, for as long as the client is there: an episode must not go to one that has left."""
        opening = asyncio.ensure_future(self.conversations.open(wait_s))
        await _while_there(request, opening)
        opened = opening.result()
        if await request.is_disconnected():
            await self.conversations.abandon(opened.episode, _GONE)
            raise _ClientLeft
        return opened

    async def finish(self, request: Request, episode: str) -> dict[str, Any]:
        """`POST /episodes/{id}/finish`."""
        body = await read_json(request, may_be_empty=True)
        unknown = [key for key in body if key not in ("info", *REWARD_NAMES)]
        if unknown:
            raise DoorRefused(f"{unknown[0]!r} is not known; put it into info", RefusalCode.INVALID, unknown[0])
        info = body.pop("info", {})
        # A text is as good as an object; rewards are refused where they are looked for, beside it and in it.
        told = {**body, **(info if isinstance(info, dict) else {"text": info})}
        done = await self.conversations.finish(episode, told)
        return {
            "id": done.episode,
            "status": done.status,
            "stop_reason": done.stop_reason,
            "turns": done.turns,
            "sampled_tokens": done.sampled_tokens,
            "segments_opened": done.segments_opened,
        }

    async def abandon(self, request: Request, episode: str) -> Response:
        """`DELETE /episodes/{id}`."""
        body = await read_body(request, AbandonRequest, may_be_empty=True)
        await self.conversations.abandon(episode, body.reason)
        return Response(status_code=204)


def build_app(conversations: Conversations, *, token: str = "", is_local: bool = False) -> FastAPI:
    """The door as an ASGI application. `token` is what clients must show as `Authorization: Bearer TOKEN`; without one
    everybody is let in, but web pages where it `is_local`."""
    door = _Door(conversations, Entry(token, is_local=is_local), DoorMetrics())
    app = FastAPI(title="headrace", docs_url=None, redoc_url=None, openapi_url=None)
    routes = APIRouter()
    for prefix in ("", "/episodes/{episode}"):
        routes.add_api_route(f"{prefix}/v1/chat/completions", door.chat, methods=["POST"], response_model=None)
        routes.add_api_route(f"{prefix}/v1/completions", door.text, methods=["POST"], response_model=None)
        routes.add_api_route(f"{prefix}/v1/models", door.models, methods=["GET"])
    routes.add_api_route("/versions", door.versions, methods=["GET"])
    routes.add_api_route("/health", door.health, methods=["GET"], response_model=None)
    routes.add_api_route("/metrics", door.page, methods=["GET"], response_model=None)
    routes.add_api_route("/episodes", door.open, methods=["POST"], response_model=None)
    routes.add_api_route("/episodes/{episode}/finish", door.finish, methods=["POST"])
    routes.add_api_route("/episodes/{episode}", door.abandon, methods=["DELETE"], response_model=None)
    app.include_router(routes)
    app.add_exception_handler(HeadraceError, _told)
    app.add_exception_handler(HTTPException, _no_page)
    app.add_exception_handler(_ClientLeft, _left)
    app.add_middleware(_Watch, door=door)
    return app


class _ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class _Watch:
    """Who may come in, and what is counted: around every route. An error that nobody expected is an answer, too."""

    def __init__(self, app: ASGIApp, door: _Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def counting(message: ASGIMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            stranger = self._door.entry.refused(Request(scope))
            await (stranger or self._app)(scope, receive, counting)
        except Exception as error:  # the boundary
            if status:  # too late to say anything
                raise
            _log.warning("%s %s: %s: %s", scope["method"], scope["path"], type(error).__name__, error)
            await refused(error)(scope, receive, counting)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._door.metrics.requested(route, status, time.monotonic() - began)


async def _told(request: Request, error: Exception) -> Response:
    """What headrace raises on purpose."""
    if not isinstance(error, DoorRefused):
        _log.warning("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return refused(error)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


async def _no_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return error_response(error_body(f"no page {request.method} {request.url.path!a:.80}", status), status)


def _retry(request: Request) -> tuple[str, bool]:
    """What the client calls its request, and whether it says that it has asked before."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return request.headers.get("idempotency-key", ""), count not in ("", "0")


async def _while_there(request: Request, doing: asyncio.Future[T], timeout_s: float | None = None) -> bool:
    """Wait until `doing` is done, but no longer than its client is there. Whether it is.

    Raises:
        _ClientLeft: before it was done; it is cancelled.
    """
    leaving = asyncio.ensure_future(_gone(request))
    ends: set[asyncio.Future[Any]] = {doing, leaving}
    try:
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not doing.done():
            raise _ClientLeft
    except BaseException:
        doing.cancel()
        raise
    finally:
        leaving.cancel()
    return doing.done()


async def _gone(request: Request) -> None:
    """Returns when the client has left. Its body has been read: nothing else comes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _shown(message: Message) -> dict[str, str]:
    return {"role": message.role.value, "content": message.content}


async def _each(events: Iterator[str]) -> AsyncIterator[str]:
    for event in events:
        yield event
