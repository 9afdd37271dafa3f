"""`takt serve` and `takt demo`: engines and a frontend on this machine, a process each, stopped together."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.status import Status
from rich.text import Text

from takt_client.cli.output import CommandError, note, notes, print_json
from takt_client.cli.processes import (
    AddressInUseError,
    Child,
    ChildFailedError,
    ServiceSpec,
    StoppedError,
    Supervisor,
    free_port,
)
from takt_client.cli.talk import Summary, show_answer
from takt_client.client import Client

ENGINE_SERVICE = "takt.engine.v1.EngineService"
FRONTEND_SERVICE = "takt.v1.InferenceService"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """What to start. Port 0 means a free one, -1 (HTTP and metrics) none; engine i takes its base ports plus i."""

    model: str
    num_engines: int = 1
    host: str = LOOPBACK
    port: int = 50051
    admin_port: int = 50052
    http_port: int = 8000
    engine_port: int = 50061
    metrics_port: int = 9100
    engine_metrics_port: int = 9101
    engine_arguments: tuple[str, ...] = ()
    frontend_arguments: tuple[str, ...] = ()

    @property
    def engines_convert(self) -> bool:
        """Whether engines must have started before the frontend: they take the tokenizer out of a GGUF file."""
        return self.model.endswith(".gguf")

    def engine_specs(self) -> list[ServiceSpec]:
        """The engines, on loopback."""
        return [self._engine_spec(index) for index in range(self.num_engines)]

    def _engine_spec(self, index: int) -> ServiceSpec:
        port = self.engine_port + index if self.engine_port else free_port()
        metrics_port = _metrics_port(self.engine_metrics_port, index)
        arguments = (
            self.model,
            *("--host", LOOPBACK, "--port", str(port)),
            *("--metrics-port", str(metrics_port), "--engine-index", str(index)),
            *self.engine_arguments,
        )
        return ServiceSpec(
            name=f"engine-{index}",
            module="engine_svc",
            arguments=arguments,
            address=f"{LOOPBACK}:{port}",
            health_service=ENGINE_SERVICE,
            metrics_address=_metrics_address(metrics_port),
        )

    def frontend_spec(self, engines: list[ServiceSpec]) -> ServiceSpec:
        """The frontend of these engines."""
        port = self.port or free_port()
        admin_port = self.admin_port or free_port()
        http_port = self.http_port or free_port()
        metrics_port = _metrics_port(self.metrics_port, 0)
        arguments = (
            self.model,
            *(item for engine in engines for item in ("--engine", engine.address)),
            *("--host", self.host, "--port", str(port)),
            *("--admin-port", str(admin_port), "--metrics-port", str(metrics_port)),
            *("--http-port", str(http_port)),
            *self.frontend_arguments,
        )
        reachable = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 - compared, not bound
        return ServiceSpec(
            name="frontend",
            module="frontend_svc",
            arguments=arguments,
            address=f"{reachable}:{port}",
            health_service=FRONTEND_SERVICE,
            metrics_address=_metrics_address(metrics_port),
            admin_address=f"{LOOPBACK}:{admin_port}",
            http_address=f"{reachable}:{http_port}" if http_port > 0 else "",
        )


def _metrics_port(base: int, index: int) -> int:
    return base + index if base > 0 else free_port() if base == 0 else -1


def _metrics_address(port: int) -> str:
    return f"{LOOPBACK}:{port}" if port > 0 else ""


@contextmanager
def running(plan: ServePlan, *, as_json: bool) -> Iterator[tuple[Supervisor, ServiceSpec]]:
    """Starts everything and yields the supervisor and the frontend once it serves; stops all at the end.

    Raises AddressInUseError, ChildFailedError or StoppedError when it does not come to that.
    """
    supervisor = Supervisor(_show_line)
    with supervisor.handling_signals():
        engines = plan.engine_specs()
        children = [supervisor.start(spec) for spec in engines]
        if plan.engines_convert:
            for child in children:
                _await_child(supervisor, child, as_json=as_json)
        children.append(supervisor.start(plan.frontend_spec(engines)))
        for child in children:
            if child.ready_seconds is None:
                _await_child(supervisor, child, as_json=as_json)
        yield supervisor, children[-1].spec


def _await_child(supervisor: Supervisor, child: Child, *, as_json: bool) -> None:
    name = child.spec.name
    with _elapsed(f"{name} is starting", child.started):
        supervisor.wait_ready(child)
    if as_json:
        spec = child.spec
        print_json(
            {
                "event": "ready",
                "service": name,
                "address": spec.address,
                "admin_address": spec.admin_address or None,
                "http_address": spec.http_address or None,
                "metrics_address": spec.metrics_address or None,
                "pid": child.pid,
                "seconds": round(child.ready_seconds or 0, 3),
            }
        )
    else:
        note(f"{name} is ready on {child.spec.address} after {child.ready_seconds:.1f} s", style="green")


@contextmanager
def _elapsed(text: str, since: float) -> Iterator[None]:
    """A spinner that counts seconds; nothing where standard error is no terminal."""
    done = threading.Event()
    with Status(f"{text} ...", console=notes) as status:

        def count() -> None:
            while not done.wait(1):
                status.update(f"{text} ... {time.monotonic() - since:.0f} s")

        counter = threading.Thread(target=count, daemon=True)
        counter.start()
        try:
            yield
        finally:
            done.set()
            counter.join()


def _show_line(name: str, line: str) -> None:
    notes.print(Text.assemble((f"{name:<9}", "cyan"), "| ", Text.from_ansi(line)))


def serve(plan: ServePlan, *, as_json: bool) -> int:
    """Serves until interrupted; returns the exit code."""
    try:
        with running(plan, as_json=as_json) as (supervisor, frontend):
            if as_json:
                print_json({"event": "serving", "model": plan.model, "address": frontend.address})
            else:
                if frontend.http_address:
                    note(f"OpenAI-compatible API on http://{frontend.http_address}/v1", style="green")
                note(f"serving {plan.model} on {frontend.address}; Ctrl-C stops", style="bold green")
            supervisor.wait()
    except StoppedError:
        return 0
    except AddressInUseError as error:
        raise CommandError(str(error)) from None
    except ChildFailedError as error:
        note(f"takt: {error}; stopped the others", style="bold red")
        return error.exit_code
    return 0


def demo(plan: ServePlan, question: str, *, as_json: bool) -> Summary:
    """Serves, asks one question greedily, prints the answer and stops. Raises CommandError when that fails."""
    try:
        with running(plan, as_json=as_json) as (_, frontend), Client(frontend.address) as client:
            if not as_json:
                note(f"> {question}", style="bold cyan")
            with client.chat(question, temperature=0.0, max_tokens=100) as stream:
                return show_answer(stream, as_json=as_json)
    except StoppedError:
        raise CommandError("interrupted") from None
    except (AddressInUseError, ChildFailedError) as error:
        raise CommandError(str(error)) from None
