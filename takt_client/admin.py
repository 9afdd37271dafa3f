"""The client for operators: what engines are doing, and calls that reach every engine of a frontend."""

from typing import Any, Self

import grpc

from takt.v1 import admin_pb2, admin_pb2_grpc
from takt_client import convert
from takt_client.client import CHANNEL_OPTIONS
from takt_client.errors import error_from_rpc
from takt_client.types import EngineResult, Load

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"


class AdminClient:
    """Speaks to the AdminService at an address. Every failure is a TaktClientError."""

    def __init__(self, address: str = DEFAULT_ADMIN_ADDRESS) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def get_load(self) -> Load:
        """What the frontend and its engines are doing."""
        return convert.load(_call(self._stub.GetLoad, admin_pb2.GetLoadRequest()))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> list[EngineResult]:
        """Forgets cached prefixes on every engine; a value of False means that blocks were in use."""
        request = admin_pb2.ResetPrefixCacheRequest(reset_running_requests=reset_running_requests)
        results = _call(self._stub.ResetPrefixCache, request).results
        return [EngineResult(r.address, r.success, r.error) for r in results]

    def ping(self) -> list[EngineResult]:
        """Seconds through the core loop of every engine and back."""
        results = _call(self._stub.Ping, admin_pb2.PingRequest()).results
        return [EngineResult(r.address, r.round_trip_seconds, r.error) for r in results]

    def start_profile(self, name: str = "") -> list[EngineResult]:
        """Starts a profile on every engine."""
        results = _call(self._stub.StartProfile, admin_pb2.StartProfileRequest(name=name)).results
        return [EngineResult(r.address, None, r.error) for r in results]

    def stop_profile(self) -> list[EngineResult]:
        """Ends the profile on every engine; values are the paths of the traces there."""
        results = _call(self._stub.StopProfile, admin_pb2.StopProfileRequest()).results
        return [EngineResult(r.address, r.trace_path, r.error) for r in results]

    def drain(self) -> int:
        """Makes the frontend refuse new requests; returns how many are in flight."""
        return int(_call(self._stub.Drain, admin_pb2.DrainRequest()).num_requests)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _call(method: Any, request: Any) -> Any:
    try:
        return method(request)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from None
