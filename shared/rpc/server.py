"""A gRPC server's life: bind, health, reflection, stop. What it serves is its owner's.

An address that cannot be had is a StartupError before anything is served. The server, its health and its handlers
belong to the one event loop that started it.
"""

import errno
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from shared.errors import StartupError
from shared.rpc.health import Health
from shared.rpc.options import Options
from shared.rpc.raw import raw_handlers

HEALTH_SERVICE = "grpc.health.v1.Health"


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A running server. `port` is the bound one, also when 0 was asked for."""

    server: grpc.aio.Server
    health: Health
    host: str
    port: int

    @property
    def address(self) -> str:
        """Where clients on this machine find it."""
        return join_address(self.host, self.port)

    def set_serving(self, service: str, *, serving: bool) -> None:
        """Sets the readiness of a service."""
        self.health.set_serving(service, serving=serving)

    def enter_graceful_shutdown(self) -> None:
        """Reports NOT_SERVING for everything; calls are still taken."""
        self.health.enter_graceful_shutdown()

    async def stop(self, grace: float | None) -> None:
        """Takes no new calls, lets running ones go on for `grace` seconds, then cancels them."""
        self.health.enter_graceful_shutdown()
        self.health.close()
        await self.server.stop(grace)


async def start_server(
    host: str,
    port: int,
    *,
    handlers: Sequence[grpc.GenericRpcHandler],
    services: Iterable[str],
    options: Options,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> RpcServer:
    """Starts serving. `services` are the full names for health, NOT_SERVING at first, and for reflection.

    Port 0 takes a free one. Raises StartupError when the address cannot be bound.
    """
    names = list(services)
    server = grpc.aio.server(options=options, interceptors=list(interceptors))
    health = Health(names)
    health_handlers = raw_handlers(health_pb2.DESCRIPTOR.services_by_name["Health"], health)
    server.add_generic_rpc_handlers((*handlers, health_handlers))
    reflection.enable_server_reflection([*names, HEALTH_SERVICE, reflection.SERVICE_NAME], server)
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise StartupError(bind_failure(host, port))
    await server.start()
    return RpcServer(server=server, health=health, host=host, port=bound)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_failure(host: str, port: int) -> str:
    """Why an address cannot be listened on, in one line; asked of the operating system after the fact."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is in use"
        return f"cannot listen on {join_address(host, port)}: {error.strerror or error}"
    return f"cannot listen on {join_address(host, port)}"
