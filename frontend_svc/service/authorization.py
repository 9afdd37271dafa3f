"""Guards a gRPC server with API keys: every method needs one, but for health checks. Denied unless named here."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from frontend_svc.api_keys import ApiKeys
from shared.errors import UnauthenticatedError
from shared.rpc.status import abort_with

# Prefixes of methods that anybody may call.
OPEN_METHODS = ("/grpc.health.v1.Health/",)


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a key with UNAUTHENTICATED, before their request is read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's own handler, or one that refuses."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_METHODS):
            return handler
        try:
            self._keys.check(_authorization(details))
        except UnauthenticatedError as error:
            return _refusing(handler, error)
        return handler


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None


def _refusing(handler: Any, error: UnauthenticatedError) -> Any:
    """A handler of the same kind that ends every call with the error."""

    async def refuse(_request: Any, context: Any) -> None:
        await abort_with(context, error)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
