"""A frontend as a process of its own."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
LINES = ("admin", "metrics", "http", "ready")


class FrontendSubprocess:
    """`python -m frontend_svc` with its output at hand. The addresses are known after `wait_ready`."""

    def __init__(self, *arguments: str) -> None:
        ports = ["--port", "0", "--admin-port", "0", "--metrics-port", "0", "--http-port", "0"]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend_svc", *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.addresses: dict[str, str] = {}
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._log: list[str] = []
        self._logged = threading.Condition()
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
            with self._logged:
                self._log.append(line)
                self._logged.notify_all()

    @property
    def log(self) -> str:
        """Standard error so far; complete after `wait`."""
        return "".join(self._log)

    def wait_logged(self, text: str, timeout: float = 20.0) -> None:
        """Waits for a text in standard error."""
        with self._logged:
            if not self._logged.wait_for(lambda: text in self.log, timeout):
                raise TimeoutError(f"no {text!r} after {timeout} s in:\n{self.log}")

    @property
    def address(self) -> str:
        return self.addresses["ready"]

    def wait_ready(self, timeout: float = 60.0) -> "FrontendSubprocess":
        """Waits for the line that says where it serves."""
        while "ready" not in self.addresses:
            try:
                line = self._lines.get(timeout=timeout)
            except Empty:
                raise TimeoutError(f"the frontend does not serve after {timeout} s:\n{self.log}") from None
            if line is None:
                raise RuntimeError(f"the frontend ended with code {self.wait()}:\n{self.log}")
            name, _, address = line.partition(": frontend on ")
            assert name in LINES, line
            self.addresses[name] = address
        return self

    def wait(self, timeout: float = 60.0) -> int:
        """Waits for the end and returns the exit code."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        """Kills it unless it has ended, and releases its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def frontend_process(*arguments: str) -> Iterator[FrontendSubprocess]:
    """A serving frontend, gone at the end."""
    frontend = FrontendSubprocess(*arguments)
    try:
        yield frontend.wait_ready()
    finally:
        frontend.close()
