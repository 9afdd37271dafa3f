"""An engine as a process of its own, with the fake executor unless told otherwise."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
READY = "ready: engine on "
METRICS = "metrics: engine on "


class EngineSubprocess:
    """`python -m engine_svc` with its output at hand. `address` and `metrics_address` are known after `wait_ready`."""

    def __init__(self, *arguments: str, model: str = "fake", executor: str = "fake", port: int = 0) -> None:
        command = [sys.executable, "-m", "engine_svc", model, "--executor", executor, "--port", str(port)]
        if "--metrics-port" not in arguments:
            command += ["--metrics-port", "-1"]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.address = ""
        self.metrics_address = ""
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_stdout, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)

    @property
    def log(self) -> str:
        """Standard error so far; complete after `wait`."""
        return "".join(self._log)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def wait_ready(self, timeout: float = 60.0) -> "EngineSubprocess":
        """Waits for the line that says where it serves."""
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except Empty:
                raise TimeoutError(f"the engine is not ready after {timeout} s:\n{self.log}") from None
            if line is None:
                self.process.wait(10)
                raise RuntimeError(f"the engine ended with code {self.process.returncode}:\n{self.log}")
            if line.startswith(METRICS):
                self.metrics_address = line.removeprefix(METRICS)
            if line.startswith(READY):
                self.address = line.removeprefix(READY)
                return self

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def terminate(self) -> None:
        """Asks for a drain."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()

    def stop(self) -> None:
        """Freezes it until `resume`."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float = 60.0) -> int:
        """Waits for the end and returns the exit code."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        """Kills it unless it has ended, and releases its pipes."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
        self.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def engine_process(*arguments: str, **options: object) -> Iterator[EngineSubprocess]:
    """A ready engine, gone at the end."""
    engine = EngineSubprocess(*arguments, **options)
    try:
        yield engine.wait_ready()
    finally:
        engine.close()
