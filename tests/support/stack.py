"""A whole stack as a user starts it, by `takt serve`; with FAKE its engines have no model."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tests.support.byte_tokenizer import VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]
FAKE = ("--executor", "fake", f"--engine-arg=--fake-vocab-size={VOCAB_SIZE}")
FREE_PORTS = (
    "--port",
    "0",
    "--admin-port",
    "0",
    "--http-port",
    "0",
    "--engine-port",
    "0",
    "--metrics-port",
    "0",
    "--engine-metrics-port",
    "0",
)


class Stack:
    """A running `takt serve`. `services` has each service's ready event, by name."""

    def __init__(self, model: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "takt_client.cli.main", "serve", model, "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.services: dict[str, dict[str, Any]] = {}
        self._events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._log: list[str] = []
        self._readers = [threading.Thread(target=target, daemon=True) for target in (self._read_events, self._read_log)]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)

    @property
    def log(self) -> str:
        """What the services and the command said so far."""
        return "".join(self._log)

    @property
    def address(self) -> str:
        return self.services["frontend"]["address"]

    @property
    def http_url(self) -> str:
        return f"http://{self.services['frontend']['http_address']}"

    @property
    def admin_address(self) -> str:
        return self.services["frontend"]["admin_address"]

    def wait_serving(self, timeout: float = 120.0) -> "Stack":
        """Waits until the frontend serves."""
        while True:
            try:
                event = self._events.get(timeout=timeout)
            except Empty:
                raise TimeoutError(f"not serving after {timeout} s:\n{self.log}") from None
            if event is None:
                raise RuntimeError(f"takt serve ended with code {self.process.wait(30)}:\n{self.log}")
            if event["event"] == "serving":
                return self
            self.services[event["service"]] = event

    def stop(self, number: int = signal.SIGINT, timeout: float = 60.0) -> int:
        """Asks the command to stop and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = 60.0) -> int:
        """Waits for the end and returns the exit code."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        """Stops it, and kills what does not stop."""
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.stop()
        finally:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def serving(model: str | Path, *arguments: str) -> Iterator[Stack]:
    """A serving stack on free ports, gone at the end."""
    stack = Stack(str(model), *FREE_PORTS, *arguments)
    try:
        yield stack.wait_serving()
    finally:
        stack.close()
