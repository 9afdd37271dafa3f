"""The standard health service: `""` is liveness, a service's own name is its readiness.

Unlike the library's servicer its watches end when the server closes, so that a watcher does not use up the grace time
of every shutdown, and bad bytes get a proper status like everywhere else.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_health.v1 import health_pb2

from shared.errors import NotFoundError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Serves Check and Watch. All methods belong to the event loop."""

    def __init__(self, services: Iterable[str]) -> None:
        self._statuses: dict[str, Any] = {"": SERVING, **dict.fromkeys(services, NOT_SERVING)}
        self._changed = asyncio.Event()
        self._shutting_down = False
        self._closed = False

    def set_serving(self, service: str, *, serving: bool) -> None:
        """Sets a status and tells its watchers; ignored once shutdown began."""
        if not self._shutting_down:
            self._statuses[service] = SERVING if serving else NOT_SERVING
            self._notify()

    def enter_graceful_shutdown(self) -> None:
        """Everything is NOT_SERVING from now on."""
        self._shutting_down = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._notify()

    def close(self) -> None:
        """Ends all watches."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's name and signature
        """The status now. Raises NotFoundError for an unknown service."""
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFoundError(f"unknown service {request.service[:128]!r}", field="service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002 - as above
        """The status now and after each change; an unknown service is SERVICE_UNKNOWN until it is set."""
        last = None
        while not self._closed:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if changed is self._changed:
                await changed.wait()
