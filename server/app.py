# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application: routes, the forms of errors, request ids."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.server import chat, completions, generate, info
from kvferry.server.answer import ErrorAnswer
from kvferry.server.errors import BAD_REQUEST, INTERNAL, NOT_FOUND, ApiError, ErrorStyle
from kvferry.server.metrics import ServerMetrics
from kvferry.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]

_ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/generate", ("POST", "PUT"), generate.generate),
    ("/v1/completions", ("POST",), completions.completions),
    ("/v1/chat/completions", ("POST",), chat.chat_completions),
    ("/health", ("GET", "HEAD"), info.health),
    ("/livez", ("GET", "HEAD"), info.livez),
    ("/health_generate", ("GET",), info.health_generate),
    ("/server_info", ("GET",), info.server_info),
    ("/get_server_info", ("GET",), info.server_info),
    ("/model_info", ("GET",), info.model_info),
    ("/get_model_info", ("GET",), info.model_info),
    ("/v1/models", ("GET",), info.models),
    ("/v1/models/{name:path}", ("GET",), info.model),
    ("/get_load", ("GET",), info.get_load),
    ("/flush_cache", ("GET", "POST"), info.flush_cache),
    ("/abort_request", ("POST",), info.abort_request),
    ("/metrics", ("GET",), info.metrics),
    ("/tokenize", ("POST",), info.tokenize),
    ("/detokenize", ("POST",), info.detokenize),
)

_REQUEST_ID = b"x-request-id"
# What may stand in a header without quoting; anything else gets an id of our own.
_PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def create_app(service: Service) -> FastAPI:
    """Builds the application that serves a service.

    Args:
      service: what it serves.

    Returns:
      An ASGI application, to be run by `serving.HttpServer`.
    """
    app = FastAPI(
        title="kvferry",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect is none of the statuses that a router understands
    )
    for path, methods, handler in _ROUTES:
        app.add_api_route(path, _endpoint(service, handler), methods=list(methods))
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_unexpected)
    known = frozenset(path for path, _, _ in _ROUTES)
    app.add_middleware(_RequestLedger, metrics=service.metrics, known_paths=known)
    return app


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


def _style(request: Request) -> ErrorStyle:
    return "openai" if request.url.path.startswith("/v1/") else "sglang"


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return ErrorAnswer(_style(request), error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = NOT_FOUND if error.status_code == 405 else error.status_code
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ErrorAnswer(_style(request), ApiError(message, status))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    return ErrorAnswer(_style(request), ApiError(f"invalid request: {error}", BAD_REQUEST))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # The server logs the traceback; the client is not shown our insides.
    message = f"internal error ({type(error).__name__}); the server's log says more"
    return ErrorAnswer(_style(request), ApiError(message, INTERNAL))


class _RequestLedger:
    """Gives every answer its X-Request-ID and counts it by route and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, known_paths: frozenset[str]):
        self._app = app
        self._metrics = metrics
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_REQUEST_ID, b"")
        request_id = given if _PLAIN_ID.fullmatch(given) else secrets.token_hex(16).encode()
        route = scope["path"] if scope["path"] in self._known_paths else "other"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(route, message["status"])
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
