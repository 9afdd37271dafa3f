"""An engine and a frontend of this machine for a benchmark, each a process, and loads on them."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from takt_client.cli.processes import Child, ServiceSpec, Supervisor, free_port

BENCH = Path(__file__).resolve().parent
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack. Seconds count from the start of a process to readiness."""

    target: str
    engine: Child
    frontend: Child

    def peak_memory_mib(self) -> tuple[float, float]:
        """Most resident memory that engine and frontend have had."""
        return peak_memory_mib(self.engine.pid), peak_memory_mib(self.frontend.pid)


def peak_memory_mib(pid: int) -> float:
    """Most resident memory that a process has had, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise ValueError(f"process {pid} has no memory")


@contextmanager
def running_stack(model: str, engine_flags: Sequence[str] = (), frontend_flags: Sequence[str] = ()) -> Iterator[Stack]:
    """Starts engine and frontend one after another, and stops both at the end."""
    engine_port, port, admin_port = free_port(), free_port(), free_port()
    lines: list[str] = []
    supervisor = Supervisor(lambda name, line: lines.append(f"{name}: {line}"))
    quiet = ("--metrics-port", "-1", "--log-level", "warning")
    engine_spec = ServiceSpec(
        name="engine",
        module="engine_svc",
        arguments=(model, "--port", str(engine_port), *quiet, *engine_flags),
        address=f"127.0.0.1:{engine_port}",
        health_service="takt.engine.v1.EngineService",
    )
    ports = ("--port", str(port), "--admin-port", str(admin_port), "--engine", engine_spec.address)
    frontend_spec = ServiceSpec(
        name="frontend",
        module="frontend_svc",
        arguments=(model, *ports, *quiet, *frontend_flags),
        address=f"127.0.0.1:{port}",
        health_service="takt.v1.InferenceService",
    )
    with supervisor.handling_signals():
        try:
            engine = supervisor.start(engine_spec)
            supervisor.wait_ready(engine)
            frontend = supervisor.start(frontend_spec)
            supervisor.wait_ready(frontend)
        except BaseException:
            print(*lines, sep="\n", file=sys.stderr)
            raise
        yield Stack(frontend_spec.address, engine, frontend)


def json_line(command: Sequence[str]) -> Figures:
    """Runs a load generator and reads its last line. It ends by itself; its errors are shown."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `clients`, each asking for `output` tokens behind `prompt` tokens, `requests` in all."""

    clients: int
    prompt: int
    output: int
    requests: int

    @property
    def name(self) -> str:
        """Name for a row."""
        return f"c={self.clients}, {self.prompt}/{self.output}"

    def arguments(self) -> list[str]:
        """For the load generators, which all take the same."""
        pairs = {"-c": self.clients, "-n": self.requests, "--inp": self.prompt, "--out": self.output}
        return [word for flag, value in pairs.items() for word in (flag, str(value))]


def measure(command: Sequence[str], load: Load) -> Figures:
    """One run of a load generator. Its prompts are the same every time: a second run on one server would find them in
    the prefix cache."""
    figures = json_line([*command, *load.arguments()])
    time.sleep(0.5)
    return {key: value for key, value in figures.items() if isinstance(value, (int, float))}


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each figure over several runs."""
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def own_load(target: str, *flags: str) -> list[str]:
    """The command of our own load generator."""
    return [sys.executable, str(BENCH / "grpc_load.py"), "--target", target, *flags]
