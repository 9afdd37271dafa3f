"""AdminService: what operators call, on a port of its own. Utility calls go to every connected engine at once.

One engine's failure is its entry's error, never the call's: the others' answers count.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from frontend_svc.routing.engine_client import AsyncEngineClient
from frontend_svc.service.calls import Context, counted
from frontend_svc.service.convert import load_response
from frontend_svc.services import Services
from shared.errors import InvalidRequestError, TaktError
from takt.v1 import admin_pb2

T = TypeVar("T")

DEFAULT_TIMEOUT_MS = 10_000
DEFAULT_PROFILE_TIMEOUT_MS = 60_000
MAX_TIMEOUT_MS = 3_600_000


class AdminServicer:
    """takt.v1.AdminService."""

    def __init__(self, services: Services, drain: Callable[[], None]) -> None:
        """`drain` makes the frontend refuse new requests."""
        self.metrics = services.metrics
        self._services = services
        self._drain = drain

    @counted
    async def GetLoad(self, _request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Tells what each engine is doing, as it last said."""
        requests = self._services.requests
        return load_response(self._services.engines.clients, len(requests), draining=requests.is_draining)

    @counted
    async def ResetPrefixCache(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Forgets cached prefixes on every engine."""
        timeout = _timeout(request.timeout_ms, DEFAULT_TIMEOUT_MS)
        running = request.reset_running_requests
        results = await self._on_every_engine(
            lambda client: client.reset_prefix_cache(reset_running_requests=running, timeout=timeout)
        )
        return admin_pb2.ResetPrefixCacheResponse(
            results=[
                admin_pb2.EngineResetResult(address=address, success=bool(value), error=error)
                for address, value, error in results
            ]
        )

    @counted
    async def Ping(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Goes through the core loop of every engine and back."""
        timeout = _timeout(request.timeout_ms, DEFAULT_TIMEOUT_MS)

        async def ping(client: AsyncEngineClient) -> float:
            start = time.monotonic()
            await client.ping(timeout=timeout)
            return time.monotonic() - start

        results = await self._on_every_engine(ping)
        return admin_pb2.PingResponse(
            results=[
                admin_pb2.EnginePingResult(address=address, round_trip_seconds=value or 0.0, error=error)
                for address, value, error in results
            ]
        )

    @counted
    async def StartProfile(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Starts a profile on every engine."""
        timeout = _timeout(request.timeout_ms, DEFAULT_TIMEOUT_MS)
        results = await self._on_every_engine(lambda client: client.start_profile(request.name, timeout=timeout))
        return admin_pb2.StartProfileResponse(results=_profile_results(results))

    @counted
    async def StopProfile(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Ends the profile on every engine."""
        timeout = _timeout(request.timeout_ms, DEFAULT_PROFILE_TIMEOUT_MS)
        results = await self._on_every_engine(lambda client: client.stop_profile(timeout=timeout))
        return admin_pb2.StopProfileResponse(results=_profile_results(results))

    @counted
    async def Drain(self, _request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Makes the frontend refuse new requests."""
        self._drain()
        return admin_pb2.DrainResponse(num_requests=len(self._services.requests))

    async def _on_every_engine(
        self, call: Callable[[AsyncEngineClient], Awaitable[T]]
    ) -> list[tuple[str, T | None, str]]:
        """Address, answer and error of every connected engine."""

        async def one(client: AsyncEngineClient) -> tuple[str, T | None, str]:
            try:
                return client.address, await call(client), ""
            except TaktError as error:
                return client.address, None, error.message

        connected = [client for client in self._services.engines.clients if client.is_connected]
        return list(await asyncio.gather(*map(one, connected)))


def _profile_results(results: list[tuple[str, str | None, str]]) -> list[admin_pb2.EngineProfileResult]:
    return [
        admin_pb2.EngineProfileResult(address=address, trace_path=value or "", error=error)
        for address, value, error in results
    ]


def _timeout(timeout_ms: int, default: int) -> float:
    if timeout_ms > MAX_TIMEOUT_MS:
        raise InvalidRequestError(f"timeout_ms must be at most {MAX_TIMEOUT_MS}, got {timeout_ms}", field="timeout_ms")
    return (timeout_ms or default) / 1000
