"""The takt command's talking subcommands, as a process against a frontend that answers by a script."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.scripted import WORDS, ScriptedFrontend, scripted

TEXT = "".join(WORDS)


@pytest.fixture
async def frontend():
    return ScriptedFrontend()


@pytest.fixture
async def address(frontend):
    async with scripted(frontend) as server:
        yield server.address


async def takt(*arguments, stdin=b"", stdout=subprocess.PIPE):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "takt_client.cli.main", *arguments),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = await asyncio.wait_for(process.communicate(data), 60)
    return process.returncode, (out or b"").decode(), err.decode()


async def test_generate_prints_the_answer_and_how_it_went(address, frontend):
    code, out, err = await takt("generate", "x", "-a", address, "--max-tokens", "5", "--stop", "A", "--stop", "B")
    assert (code, out) == (0, TEXT + "\n")
    assert "9 prompt tokens, 3 output tokens" in err
    assert "time to first token" in err
    assert "tokens/s" in err
    sampling = frontend.requests[-1].sampling
    assert (sampling.max_tokens, list(sampling.stop)) == (5, ["A", "B"])
    assert not sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("arguments", "stdin", "field"),
    [
        (("generate", "x", "--max-tokens", str(10**30)), b"", "max_tokens"),
        (("generate", "x", "--seed", str(2**63)), b"", "seed"),
        (("generate", "-"), b"\xff", "text"),
        (("generate", b"\xff"), b"", "text"),
        (("generate", "x", "--model", b"\xff"), b"", "model"),
        (("tokenize", b"\xff"), b"", "text"),
        (("chat",), b"\xff\n", "messages"),
    ],
)
async def test_what_cannot_be_sent_is_one_line(address, arguments, stdin, field):
    code, _, err = await takt(*arguments, "-a", address, stdin=stdin)
    assert code == 1
    assert f"takt: INVALID_ARGUMENT: {field} cannot be sent: " in err
    assert "Traceback" not in err


@pytest.fixture
def full():
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("there is no /dev/full")
    with path.open("w") as file:
        yield file


async def test_an_output_that_is_full_is_one_line(address, full):
    code, _, err = await takt("chat", "-m", "x", "-a", address, "--json", stdout=full)
    assert (code, err) == (1, "takt: [Errno 28] No space left on device\n")


async def test_json_is_one_object_a_line(address):
    code, out, _ = await takt("chat", "-m", "x", "-a", address, "--json")
    assert code == 0
    *chunks, summary = [json.loads(line) for line in out.splitlines()]
    assert [chunk["text"] for chunk in chunks] == WORDS
    assert chunks[-1]["finish_reason"] == "stop"
    assert summary["summary"]["text"] == TEXT
    assert summary["summary"]["usage"]["completion_tokens"] == 3
    assert summary["summary"]["time_to_first_token_seconds"] > 0


async def test_a_conversation_keeps_what_was_said(address, frontend):
    code, out, _ = await takt("chat", "-s", "be brief", "-a", address, stdin="one\n\ntwo\n/clear\nthree\n/quit\nfour\n")
    assert code == 0
    assert out.count(TEXT) == 3
    said = [[(m.role, m.content) for m in request.messages] for request in frontend.requests]
    opening = ("system", "be brief")
    assert said[0] == [opening, ("user", "one")]
    assert said[1] == [opening, ("user", "one"), ("assistant", TEXT), ("user", "two")]
    assert said[2] == [opening, ("user", "three")]


async def test_a_failure_is_one_line_and_exit_code_1(address):
    for arguments in (("generate", "invalid"), ("chat", "-m", "invalid")):
        code, out, err = await takt(*arguments, "-a", address)
        assert (code, out) == (1, "")
        assert err.splitlines() == ["takt: INVALID_ARGUMENT: top_p must be in (0, 1], got 7"]
    code, _, err = await takt("load", "-a", "127.0.0.1:1")
    assert code == 1
    assert err.startswith("takt: UNAVAILABLE: ")
    assert "does a frontend serve there? takt serve MODEL starts one" in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


async def test_tokens_models_and_load(address):
    code, out, _ = await takt("tokenize", "ab", "-a", address, "--json")
    assert code == 0
    assert json.loads(out) == {"token_ids": [1, 2], "tokens": ["a", "b"], "max_model_len": 64}
    code, out, _ = await takt("tokenize", "-", "-a", address, stdin="ab")
    assert [line.split() for line in out.splitlines()] == [["1", "a"], ["2", "b"]]
    code, out, _ = await takt("model", "list", "-a", address, "--json")
    assert json.loads(out) == {"name": "m", "root": "models/m", "max_model_len": 64, "num_ready_engines": 2}
    code, out, _ = await takt("load", "-a", address, "--json")
    load = json.loads(out)
    assert [engine["state"] for engine in load["engines"]] == ["ready", "connecting"]
    code, out, _ = await takt("load", "-a", address)
    assert code == 0
    assert "25.0%" in out
    assert "e:2: refused" in out


async def test_help_of_every_command_is_shown():
    for command in ([], ["serve"], ["demo"], ["chat"], ["generate"], ["tokenize"], ["load"], ["model"]):
        code, out, _ = await takt(*command, "--help")
        assert code == 0
        assert "Usage: " in out


async def test_engine_and_frontend_take_the_services_own_arguments():
    code, out, _ = await takt("engine", "--help")
    assert code == 0
    assert "--num-blocks" in out
    code, out, _ = await takt("model", "pull", "--help")
    assert code == 0
    assert "smollm2" in out


async def test_flags_of_options_reach_the_request(address, frontend, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    arguments = ["--n", "2", "--logprobs", "1", "--presence-penalty", "0.5", "--bad-word", "x"]
    code, out, err = await takt("generate", "rich", "-a", address, "--json-schema", str(schema), *arguments)
    assert code == 0, err
    sampling = frontend.requests[-1].sampling
    assert (sampling.n, sampling.logprobs, sampling.presence_penalty) == (2, 1, 0.5)
    assert list(sampling.bad_words) == ["x"]
    assert sampling.structured_output.json_schema == '{"type": "object"}'
    assert out == "aA\nbB\n"
    assert "-0.500" in err
    assert "output 1:" in err
    code, out, _ = await takt("generate", "rich", "-a", address, "--json", "--regex", "a")
    assert code == 0
    assert json.loads(out.splitlines()[1])["logprobs"][0]["token"]["bytes"] == [0xC3]
    code, _, err = await takt("generate", "x", "-a", address, "--regex", "a", "--choice", "b")
    assert (code, "give only one of" in err) == (1, True)


async def test_embed_prints_a_vector_a_line(address):
    code, out, err = await takt("embed", "ab", "c", "-a", address)
    assert (code, [json.loads(line) for line in out.splitlines()]) == (0, [[2.0, 0.5], [1.0, 0.5]])
    assert "7 prompt tokens" in err
