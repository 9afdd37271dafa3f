"""Services of this machine as child processes: started together, watched, stopped together.

Each child is a process group of its own, so that an interrupt at the terminal reaches only this process, which then
stops the children in order; when this process is killed, the kernel kills them. What a child prints is passed
on line by line.
"""

import errno
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from takt.v1 import admin_pb2, admin_pb2_grpc
from takt_client.cli.bound import command

POLL_SECONDS = 0.1
CHECK_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A service to start: `python -m module arguments`, ready when `health_service` is SERVING at `address`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    health_service: str
    metrics_address: str = ""
    admin_address: str = ""
    http_address: str = ""


class ChildFailedError(Exception):
    """A child ended although nobody stopped it. `exit_code` is never 0."""

    def __init__(self, name: str, returncode: int) -> None:
        # A death by signal n is reported as shells do.
        self.exit_code = returncode if returncode > 0 else 128 - returncode if returncode else 1
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"exited with code {returncode}"
        super().__init__(f"{name} {how}")


class EngineRefusedError(ChildFailedError):
    """The frontend will never use an engine of its own: they were told of models that do not fit."""

    def __init__(self, address: str, reason: str) -> None:
        Exception.__init__(self, f"the frontend does not take engine {address}: {reason}")
        self.exit_code = 1


class AddressInUseError(Exception):
    """Somebody else listens where a service should: its health would be taken for the service's own."""


class StoppedError(Exception):
    """The user asked to stop while the services were starting."""


class Child:
    """One running service."""

    def __init__(self, spec: ServiceSpec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.started = time.monotonic()
        self.ready_seconds: float | None = None
        self._process = subprocess.Popen(  # noqa: S603 - our own modules with the user's own flags
            command(spec.module, spec.arguments),
            stdin=subprocess.DEVNULL,
            # The services' own announcements for programs; the log says the same.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._pass_on, args=(on_line,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _pass_on(self, on_line: Callable[[str, str], None]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            on_line(self.spec.name, line.rstrip("\n"))

    def raise_if_ended(self) -> None:
        """Raises ChildFailedError once the process is gone."""
        returncode = self._process.poll()
        if returncode is not None:
            self._reader.join(CHECK_TIMEOUT_SECONDS)
            raise ChildFailedError(self.spec.name, returncode)

    def is_ready(self) -> bool:
        """Asks the service's health once."""
        with grpc.insecure_channel(self.spec.address) as channel:
            request = health_pb2.HealthCheckRequest(service=self.spec.health_service)
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CHECK_TIMEOUT_SECONDS)
            except grpc.RpcError:
                return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def raise_if_refusing(self) -> None:
        """Asks a frontend once; raises EngineRefusedError when it refuses one of its engines."""
        if not self.spec.admin_address:
            return
        with grpc.insecure_channel(self.spec.admin_address) as channel:
            request = admin_pb2.GetLoadRequest()
            try:
                load = admin_pb2_grpc.AdminServiceStub(channel).GetLoad(request, timeout=CHECK_TIMEOUT_SECONDS)
            except grpc.RpcError:
                return
        for engine in load.engines:
            if engine.state == admin_pb2.ENGINE_STATE_REFUSED:
                raise EngineRefusedError(engine.address, engine.last_error)

    def send(self, signal_number: int) -> None:
        """Sends a signal unless the process is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal_number)

    def wait(self, force: threading.Event) -> None:
        """Waits for the end; kills the process when `force` is set meanwhile."""
        while self._process.poll() is None:
            if force.wait(POLL_SECONDS):
                self._process.kill()
                self._process.wait()
        self._reader.join(CHECK_TIMEOUT_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()


class Supervisor:
    """Starts services and stops them in reverse order: the one started last depends on the others."""

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self.children: list[Child] = []
        self.stop_requested = threading.Event()
        self._force = threading.Event()

    def start(self, spec: ServiceSpec) -> Child:
        """Starts a service without waiting for it. Raises AddressInUseError."""
        _require_free(spec.address)
        child = Child(spec, self._on_line)
        self.children.append(child)
        return child

    def wait_ready(self, child: Child) -> None:
        """Waits until a service is ready. Raises ChildFailedError when any ends, StoppedError when asked to stop."""
        while not child.is_ready():
            self._check_all()
            child.raise_if_refusing()
            if self.stop_requested.wait(POLL_SECONDS):
                raise StoppedError
        child.ready_seconds = time.monotonic() - child.started

    def wait(self) -> None:
        """Waits until asked to stop. Raises ChildFailedError when any service ends before."""
        while not self.stop_requested.wait(POLL_SECONDS):
            self._check_all()

    def _check_all(self) -> None:
        for child in self.children:
            child.raise_if_ended()

    def stop_all(self) -> None:
        """Lets the services drain one after another, the last started first."""
        for child in reversed(self.children):
            child.send(signal.SIGTERM)
            child.wait(self._force)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stop_requested.is_set():
            self._force.set()
        self.stop_requested.set()

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM asks to stop, the second kills what has not stopped. Always stops everything."""
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            try:
                self.stop_all()
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)


def _require_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (OSError, OverflowError) as error:
        # Whatever else is wrong with an address the service tells itself.
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"port {port} on {host} is in use") from None


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
