"""`takt serve` starts everything, stops everything, and says in one line why it cannot."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from takt_client.client import Client
from tests.support.stack import FAKE, FREE_PORTS, ROOT, Stack, serving
from tests.support.tiny_gguf import write_llama_gguf
from tests.support.tiny_models import tiny_checkpoint

ANSWER = {"temperature": 0.0, "max_tokens": 5}


def wait_gone(pid):
    """Waits until a process is no more."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def pids(stack):
    return [event["pid"] for event in stack.services.values()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_everything_is_stopped_together(byte_model, number):
    with serving(byte_model, *FAKE, "--engines", "2") as stack:
        assert sorted(stack.services) == ["engine-0", "engine-1", "frontend"]
        with Client(stack.address) as client:
            assert client.generate("x", **ANSWER).result().finish_reason == "length"
        assert stack.stop(number) == 0
        for pid in pids(stack):
            wait_gone(pid)


def test_requests_in_flight_are_finished_before_it_stops(byte_model):
    with serving(byte_model, *FAKE, "--engine-arg=--fake-step-ms=20") as stack, Client(stack.address) as client:
        with client.generate("x", temperature=0.0, max_tokens=60) as stream:
            next(stream)
            stack.process.send_signal(signal.SIGTERM)
            output = stream.result()
        assert output.finish_reason == "length"
        assert stack.wait() == 0


def test_the_second_signal_kills(byte_model):
    with serving(byte_model, *FAKE, "--engine-arg=--fake-step-ms=200") as stack, Client(stack.address) as client:
        with client.generate("x", temperature=0.0, max_tokens=500) as stream:
            next(stream)
            stack.process.send_signal(signal.SIGINT)
            # Still draining, for minutes if it were let.
            next(stream)
            began = time.monotonic()
            assert stack.stop(signal.SIGINT, timeout=30) == 0
            assert time.monotonic() - began < 20
        for pid in pids(stack):
            wait_gone(pid)


def test_a_service_that_dies_takes_the_others_with_it(byte_model):
    with serving(byte_model, *FAKE) as stack:
        os.kill(stack.services["engine-0"]["pid"], signal.SIGKILL)
        assert stack.wait() == 128 + signal.SIGKILL
        for pid in pids(stack):
            wait_gone(pid)
        assert "engine-0 was killed by signal 9" in stack.log


@pytest.mark.skipif(sys.platform != "linux", reason="Linux kills the children of a killed process")
def test_no_service_outlives_a_command_that_is_killed(byte_model):
    with (
        serving(byte_model, *FAKE, "--engine-arg=--fake-step-ms=20") as stack,
        Client(stack.address) as client,
        client.generate("x", temperature=0.0, max_tokens=500) as stream,
    ):
        next(stream)
        stack.process.kill()
        for pid in pids(stack):
            wait_gone(pid)


def failing(model, *arguments):
    stack = Stack(str(model), *arguments)
    try:
        with pytest.raises(RuntimeError):
            stack.wait_serving(60)
        return stack.wait(), stack.log
    finally:
        stack.close()


def test_a_port_in_use_is_one_line_and_exit_code_1(byte_model):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        code, log = failing(byte_model, *FREE_PORTS, *FAKE, "--port", str(port))
    assert code == 1
    assert f"port {port} on 127.0.0.1 is in use" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("flag", ["--port", "--engine-port"])
def test_the_health_of_another_stack_is_not_taken_for_its_own(byte_model, stack, flag):
    service = "frontend" if flag == "--port" else "engine-0"
    port = stack.services[service]["address"].rpartition(":")[2]
    # It must never say that it serves.
    code, log = failing(byte_model, *FREE_PORTS, *FAKE, flag, port)
    assert code == 1
    assert f"takt: port {port} on 127.0.0.1 is in use" in log


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path):
    code, log = failing(tmp_path / "nothing", *FREE_PORTS)
    assert code == 1
    assert str(tmp_path / "nothing") in log
    assert "Traceback" not in log


def test_a_gguf_file_is_served_from_the_first_time_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TAKT_CACHE", str(tmp_path / "cache"))
    file = write_llama_gguf(tiny_checkpoint("llama", tmp_path / "checkpoint"), tmp_path / "tiny.gguf")
    with serving(file, "--engines", "2") as stack, Client(stack.address) as client:
        assert client.generate("ab", **ANSWER).result().usage.completion_tokens >= 1


def test_a_gguf_file_that_is_none_is_one_line_of_the_engine(tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    code, log = failing(file, *FREE_PORTS)
    assert code == 1
    assert "engine-0 | engine: " in log
    assert "Traceback" not in log


def test_a_tokenizer_that_does_not_fit_is_one_line_and_exit_code_1(byte_model):
    too_small = ("--executor", "fake", "--engine-arg=--fake-vocab-size=100")
    code, log = failing(byte_model, *FREE_PORTS, *too_small)
    assert code == 1
    assert "takt: the frontend does not take engine 127.0.0.1:" in log
    assert "its vocabulary of 100 lacks tokens of the tokenizer's" in log
    assert "Traceback" not in log


def test_demo_asks_one_question_and_stops(byte_model):
    fake = [argument for argument in FAKE if argument.startswith("--engine-arg")]
    command = [sys.executable, "-m", "takt_client.cli.main", "demo", str(byte_model), "--json", "-q", "Hello?"]
    result = subprocess.run(
        [*command, *fake, "--engine-arg=--executor=fake"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["service"] for event in events if event.get("event") == "ready"] == ["engine-0", "frontend"]
    summary = events[-1]["summary"]
    assert summary["usage"]["completion_tokens"] == 100
    assert summary["time_to_first_token_seconds"] > 0
    assert summary["tokens_per_second"] > 0
