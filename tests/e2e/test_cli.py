"""The talking subcommands of takt against a real stack of two fake engines."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading

from engine_svc.executor.fake import fake_token
from tests.support.byte_tokenizer import VOCAB_SIZE, decode_bytes, encode_bytes
from tests.support.stack import ROOT

# As the terminal gets it, in colour.
PROMPT = ">\x1b[0m "
TAKT = [sys.executable, "-m", "takt_client.cli.main"]


def takt(*arguments, stdin=None):
    return subprocess.run(
        [*TAKT, *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def answer(prompt, seed, count):
    return [fake_token(encode_bytes(prompt), seed, index, VOCAB_SIZE) for index in range(count)]


def test_generate_prints_the_engines_tokens(stack):
    result = takt("generate", "Once", "-a", stack.address, "--seed", "7", "--max-tokens", "20", "--json")
    assert result.returncode == 0, result.stderr
    *chunks, summary = [json.loads(line) for line in result.stdout.splitlines()]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == answer("Once", 7, 20)
    assert summary["summary"]["text"] == decode_bytes(answer("Once", 7, 20))
    assert summary["summary"]["finish_reason"] == "length"


def test_the_prompt_can_come_from_standard_input(stack):
    result = takt("generate", "-", "-a", stack.address, "--seed", "7", "--max-tokens", "5", stdin="Once")
    assert result.stdout == decode_bytes(answer("Once", 7, 5)) + "\n"


def test_tokenize_shows_the_tokens(stack):
    result = takt("tokenize", "hi 😀", "-a", stack.address, "--json")
    assert json.loads(result.stdout)["token_ids"] == encode_bytes("hi 😀")


def test_load_and_models_of_the_stack(stack):
    load = json.loads(takt("load", "-a", stack.admin_address, "--json").stdout)
    assert [engine["state"] for engine in load["engines"]] == ["ready", "ready"]
    assert {engine["address"] for engine in load["engines"]} == {
        stack.services[name]["address"] for name in ("engine-0", "engine-1")
    }
    model = json.loads(takt("model", "list", "-a", stack.address, "--json").stdout)
    assert (model["name"], model["num_ready_engines"]) == ("bytes", 2)


def test_a_bad_option_is_told_by_the_service(stack):
    result = takt("generate", "x", "-a", stack.address, "--top-p", "7")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("takt: INVALID_ARGUMENT: ")
    assert "top_p" in result.stderr
    assert "7" in result.stderr


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        self.process = subprocess.Popen(
            [*TAKT, *arguments], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self.output = ""
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, 65_536)
            except OSError:
                return
            with self._grown:
                self.output += data.decode("utf-8", "replace")
                self._grown.notify_all()

    def wait_for(self, text, count=1):
        with self._grown:
            assert self._grown.wait_for(lambda: self.output.count(text) >= count, timeout=30), self.output

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self.master)


def test_a_conversation_in_a_terminal_survives_a_failed_answer(stack):
    terminal = Terminal("chat", "-a", stack.address, "--seed", "1", "--max-tokens", "3")
    try:
        terminal.wait_for(PROMPT)
        # More than the model's context holds.
        terminal.type("x" * 4_000 + "\n")
        terminal.wait_for("INVALID_ARGUMENT: ")
        terminal.type("Hello\n")
        terminal.wait_for("finished by length")
        terminal.type("/quit\n")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()


def test_a_conversation_in_a_terminal(stack):
    terminal = Terminal("chat", "-a", stack.address, "--seed", "1", "--max-tokens", "12")
    try:
        terminal.wait_for(PROMPT)
        terminal.type("Hello\n")
        terminal.wait_for("12 output tokens")
        terminal.wait_for(PROMPT, 2)
        terminal.type("/quit\n")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()


def test_watching_the_load_until_interrupted(stack):
    terminal = Terminal("load", "-a", stack.admin_address, "--watch", "--interval", "0.1")
    try:
        terminal.wait_for(stack.services["engine-1"]["address"], 3)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) in (0, 1, 130)
        assert "Traceback" not in terminal.output
    finally:
        terminal.close()
