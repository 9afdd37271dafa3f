"""The engine's end of a process of trials: started when it is first needed, killed when it takes too long.

Belongs to one thread, except for `kill`. A process that was killed or died is replaced by a new one for the next
question.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine_svc.grammar.trial import LENGTH, message_bytes
from shared.errors import InvalidRequestError, TaktError, UnavailableError, error_from_code
from shared.types import StructuredOutputSpec

# How long a new process may take to load the tokenizer; not part of any grammar's time.
START_SECONDS = 60.0
_ROOT = Path(__file__).resolve().parents[2]
# Compiles at once in any time, so that the answer tells that the process is there.
_FIRST_QUESTION = {"kind": 3, "spec": "a"}


class TrialProcess:
    """Compiles grammars in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        """`arguments` are those of engine_svc.grammar.trial."""
        self._arguments = arguments
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def compile(self, spec: StructuredOutputSpec, field: str, seconds: float) -> str:
        """The grammar of a spec as the library takes it. Raises TaktError, for one over its limits too."""
        process = self._require_process()
        question = {"kind": int(spec.kind), "spec": spec.spec}
        try:
            reply = _ask(process, question, seconds)
        except TimeoutError:
            _end(process)
            message = f"{field} must compile within {seconds:g} s, got one that does not"
            raise InvalidRequestError(message, field=field, reason="GRAMMAR_TIMEOUT") from None
        except OSError:
            _end(process)
            if self._closed:
                raise UnavailableError("the engine was shut down", reason="DRAINING") from None
            message = f"{field} must compile within the limits of memory and stack, got one that does not"
            raise InvalidRequestError(message, field=field, reason="GRAMMAR_LIMIT") from None
        if "source" in reply:
            return str(reply["source"])
        raise _error(reply)

    def _require_process(self) -> subprocess.Popen[bytes]:
        """The running process. Raises UnavailableError when none can be started."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the engine was shut down", reason="DRAINING")
            process = self._process
            if process is not None and process.poll() is None:
                return process
            process = self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "engine_svc.grammar.trial", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A library that gives up says so at length.
                stderr=subprocess.DEVNULL,
                cwd=_ROOT,
            )
        try:
            _ask(process, _FIRST_QUESTION, START_SECONDS)
        except OSError:
            _end(process)
            raise UnavailableError(
                "the process that tries grammars did not start", field="structured_output", reason="NO_GRAMMARS"
            ) from None
        return process

    def kill(self) -> None:
        """Ends the process for good, from any thread: a question under way fails at once. Idempotent."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Ends the process and lets go of it. Idempotent."""
        self.kill()
        if self._process is not None:
            _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            # What was written and not read is lost with the process.
            with contextlib.suppress(OSError):
                stream.close()


def _error(reply: dict[str, Any]) -> TaktError:
    return error_from_code(reply["code"], reply["message"], reason=reply["reason"], field=reply["field"])


def _ask(process: subprocess.Popen[bytes], question: Any, seconds: float) -> dict[str, Any]:
    """The answer. Raises TimeoutError, and another OSError when the process dies."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    process.stdin.write(message_bytes(question))
    process.stdin.flush()
    head = _read(process, LENGTH.size, deadline)
    reply: dict[str, Any] = json.loads(_read(process, LENGTH.unpack(head)[0], deadline))
    return reply


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    data = b""
    while len(data) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
            raise TimeoutError
        part = os.read(descriptor, size - len(data))
        if not part:
            raise BrokenPipeError
        data += part
    return data
