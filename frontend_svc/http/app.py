"""The HTTP edge as an ASGI application: paths, keys, bodies, errors. What a path does is in handlers.

Every path needs a key when there are keys, but for the health checks. Every answer that is not streamed is whole; every
fault is told in OpenAI's shape.
"""

import asyncio
import importlib.metadata
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend_svc.api_keys import ApiKeys
from frontend_svc.http.call import HttpCall
from frontend_svc.http.errors import (
    BODY_TOO_LARGE,
    METHOD_NOT_ALLOWED,
    UNKNOWN_PATH,
    UNSUPPORTED_MEDIA_TYPE,
    dump,
    error_body,
    headers_of,
    status_name,
    status_of,
)
from frontend_svc.http.fields import parse_body
from frontend_svc.http.handlers import Exchange, Handlers
from frontend_svc.http.reply import Reply
from frontend_svc.services import Services
from frontend_svc.validation import validate_model
from shared.errors import InternalError, InvalidRequestError, TaktError, UnauthenticatedError, UnavailableError

logger = logging.getLogger(__name__)

# Paths that anybody may ask for.
OPEN_PATHS = frozenset(("/health", "/ping"))
MAX_REQUEST_ID_CHARACTERS = 200
DISTRIBUTION = "takt-serving"

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class ClientLeftError(Exception):
    """The client left before it had sent all."""


def make_app(services: Services, *, max_body_bytes: int, max_prompts: int, keys: ApiKeys | None = None) -> ASGIApp:
    """The application. `max_prompts` is the most prompts a completion."""
    handlers = Handlers(services, max_prompts)
    posts: dict[str, Handler] = {
        "/v1/chat/completions": handlers.chat,
        "/v1/completions": handlers.completion,
        "/v1/embeddings": handlers.embed,
        "/tokenize": handlers.tokenize,
        "/detokenize": handlers.detokenize,
    }
    pages = _Pages(services)
    app = Starlette(
        routes=[
            *(
                Route(path, _Post(path, handler, services, max_body_bytes), methods=["POST"])
                for path, handler in posts.items()
            ),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/health", pages.health),
            Route("/ping", pages.health, methods=["GET", "POST"]),
            Route("/metrics", pages.metrics),
            Route("/version", pages.version),
        ],
        exception_handlers={HTTPException: _no_such_path, TaktError: _failed},
    )
    return app if keys is None else _Guard(app, keys)


class _Guard:
    """Lets in who has a key, before anything is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check(Headers(scope=scope).get("authorization"))
            except UnauthenticatedError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def error_response(error: TaktError) -> Response:
    """An error as an answer."""
    return _json(error_body(error), status_of(error), headers_of(error))


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, "application/json")


async def _failed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TaktError)
    return error_response(error)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.method} is not what {request.url.path} takes"
        fault = InvalidRequestError(message, reason=METHOD_NOT_ALLOWED)
    else:
        fault = InvalidRequestError(f"there is no {request.url.path}", reason=UNKNOWN_PATH)
    return _json(error_body(fault), error.status_code, error.headers)


# --- what is asked by GET ---------------------------------------------------------------------------------------------


class _Pages:
    """Answers without a journey."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._started = int(time.time())

    async def models(self, _request: Request) -> Response:
        """The names of the served model."""
        return _json({"object": "list", "data": [self._model(name) for name in self._services.model_names]})

    async def model(self, request: Request) -> Response:
        """One of them. Raises NotFoundError."""
        name = request.path_params["model"]
        validate_model(name, self._services.model_names)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        services = self._services
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "takt",
            "root": services.model_root,
            "parent": None,
            "max_model_len": services.max_model_len or None,
        }

    async def health(self, _request: Request) -> Response:
        """200 while requests are taken."""
        services = self._services
        if services.requests.is_draining:
            return error_response(UnavailableError("the frontend is draining", reason="DRAINING"))
        if not services.engines.ready:
            return error_response(UnavailableError("no engine is ready", reason="NO_ENGINE"))
        return Response()

    async def metrics(self, request: Request) -> Response:
        """The frontend's metrics, as Prometheus reads them."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._services.metrics.registry), headers={"content-type": content_type})

    async def version(self, _request: Request) -> Response:
        """The version of this service."""
        return _json({"version": _version()})


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# --- what is asked by POST --------------------------------------------------------------------------------------------


class _Post:
    """One path that takes a JSON body."""

    def __init__(self, path: str, handler: Handler, services: Services, max_body_bytes: int) -> None:
        self._path = path
        self._handler = handler
        self._metrics = services.metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        is_valid = len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
        reply = Reply(send, given if given and is_valid else secrets.token_hex(16))
        status = "CANCELLED"
        try:
            if not is_valid:
                rule = f"at most {MAX_REQUEST_ID_CHARACTERS} printable characters"
                raise InvalidRequestError(f"X-Request-Id must be {rule}, got {len(given)} characters")  # noqa: TRY301
            _check_content_type(headers.get("content-type", ""))
            body = parse_body(await read_body(receive, headers, self._max_body_bytes))
            call = HttpCall(scope, receive, headers)
            if await call.run(self._handler(Exchange(body, call, reply, given))):
                status = "OK"
        except ClientLeftError:
            pass
        except asyncio.CancelledError:
            # The server stops, and nothing else cancels: the end of this task is the end of its answer.
            await reply.error(UnavailableError("the frontend shuts down", reason="DRAINING"))
        except TaktError as error:
            status = status_name(error)
            await reply.error(error)
        except Exception:
            logger.exception("%s failed", self._path)
            status = "INTERNAL"
            await reply.error(InternalError("the service failed; its log tells why"))
        finally:
            self._metrics.call_ended(self._path, status)


def _check_content_type(value: str) -> None:
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type must be application/json, got {kind[:80] or 'none'}"
        raise InvalidRequestError(message, reason=UNSUPPORTED_MEDIA_TYPE)


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The body. Raises InvalidRequestError when it is longer than the limit, ClientLeftError when it does not come."""
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_long(limit)
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _too_long(limit)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_long(limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"body must be at most {limit} bytes, got more", reason=BODY_TOO_LARGE)
