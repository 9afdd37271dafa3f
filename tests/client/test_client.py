"""The sync, the async and the operator's client, against a frontend that answers by a script."""

import asyncio
import json

import pytest

from takt.v1 import types_pb2
from takt_client.admin import AdminClient
from takt_client.aio import AsyncClient
from takt_client.client import Client
from takt_client.errors import TaktClientError
from takt_client.types import Timings, TokenCandidate, TokenLogprobs, ToolCall, Usage
from tests.client.scripted import WORDS, ScriptedFrontend, scripted

TEXT = "".join(WORDS)


@pytest.fixture
async def frontend():
    return ScriptedFrontend()


@pytest.fixture
async def address(frontend):
    async with scripted(frontend) as server:
        yield server.address


async def in_thread(address, work):
    """Runs work with a sync client while the server's loop goes on."""

    def run():
        with Client(address) as client:
            return work(client)

    return await asyncio.to_thread(run)


def check_chunks(chunks):
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.token_ids for chunk in chunks] == [(10,), (11,), (12,)]
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert (last.request_id, last.index, last.finish_reason, last.stop_reason) == ("r-1", 0, "stop", "END")
    assert last.usage == Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3)
    assert last.timings == Timings(0.5, 0, 0, 0, 2.0, 1)


async def test_chunks_of_generate_and_chat(address):
    check_chunks(await in_thread(address, lambda client: list(client.generate("x"))))
    check_chunks(await in_thread(address, lambda client: list(client.chat("x"))))
    async with AsyncClient(address) as client:
        check_chunks([chunk async for chunk in client.generate("x")])
        check_chunks([chunk async for chunk in client.chat([{"role": "user", "content": "x"}])])


async def test_a_result_is_the_chunks_together(address):
    output = await in_thread(address, lambda client: client.generate([1, 2]).result())
    assert (output.text, output.token_ids, output.finish_reason) == (TEXT, (10, 11, 12), "stop")
    async with AsyncClient(address) as client:
        assert await client.chat("x").result() == output


async def test_options_arrive_by_the_names_of_the_protos(address, frontend):
    options = {
        "temperature": 0.0,
        "top_k": -1,
        "max_tokens": 7,
        "stop": "END",
        "stop_token_ids": [3, 4],
        "logit_bias": {5: -1.5},
        "structured_output": {"regex": "a+"},
        "repetition_detection": {"max_pattern_size": 4},
        "request_id": "mine",
        "priority": -2,
        "data_parallel_rank": 0,
        "timeout": 30.0,
    }
    await in_thread(address, lambda client: client.generate([7, 8], **options).result())
    request = frontend.requests[-1]
    sampling = request.sampling
    assert list(request.token_ids.ids) == [7, 8]
    assert (request.request_id, request.priority) == ("mine", -2)
    assert request.HasField("data_parallel_rank")
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert (sampling.top_k, sampling.max_tokens) == (-1, 7)
    assert list(sampling.stop) == ["END"]
    assert list(sampling.stop_token_ids) == [3, 4]
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(5, -1.5)]
    assert sampling.structured_output.regex == "a+"
    assert sampling.repetition_detection.max_pattern_size == 4


async def test_an_option_that_is_not_there_is_a_type_error(address):
    async with AsyncClient(address) as client:
        for name in ("temprature", "text", "messages", "sampling"):
            with pytest.raises(TypeError, match=name):
                client.generate("x", **{name: 1})
        with pytest.raises(TypeError, match="tools"):
            client.generate("x", tools=["{}"])


async def test_empty_prompts_are_sent_as_they_are(address, frontend):
    async with AsyncClient(address) as client:
        await client.generate("").result()
        assert frontend.requests[-1].WhichOneof("prompt") == "text"
        await client.generate([]).result()
        assert frontend.requests[-1].WhichOneof("prompt") == "token_ids"


async def failure(address, prompt):
    with pytest.raises(TaktClientError) as sync_failure:
        await in_thread(address, lambda client: client.generate(prompt).result())
    async with AsyncClient(address) as client:
        with pytest.raises(TaktClientError) as async_failure:
            await client.chat(prompt).result()
    assert vars(sync_failure.value) == vars(async_failure.value)
    return sync_failure.value


async def test_errors_tell_code_reason_field_and_when_to_retry(address):
    error = await failure(address, "overloaded")
    assert (error.code, error.reason, error.field) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "")
    assert error.retry_seconds == 1
    assert error.metadata == {"limit": "5"}
    assert str(error) == "RESOURCE_EXHAUSTED: the queue is full"
    error = await failure(address, "invalid")
    assert (error.code, error.field, error.retry_seconds) == ("INVALID_ARGUMENT", "sampling.top_p", None)
    assert (await failure(address, "broken")).reason == "SLOW_CONSUMER"


async def test_nobody_listening_is_unavailable():
    with pytest.raises(TaktClientError) as caught:
        await in_thread("127.0.0.1:1", lambda client: client.list_models())
    assert caught.value.code == "UNAVAILABLE"


async def test_a_deadline_ends_the_request(address, frontend):
    async with AsyncClient(address) as client:
        with pytest.raises(TaktClientError) as caught:
            await client.generate("forever", timeout=0.3).result()
    assert caught.value.code == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(frontend.ended.wait(), 10)


def read_two_then_close(client):
    with client.generate("forever") as stream:
        words = [next(stream).text, next(stream).text]
    assert list(stream) == []
    return words


def read_one_then_drop(client):
    return [next(client.generate("forever")).text]


@pytest.mark.parametrize(("work", "count"), [(read_two_then_close, 2), (read_one_then_drop, 1)])
async def test_closing_or_dropping_a_stream_aborts_its_request(address, frontend, work, count):
    assert await in_thread(address, work) == WORDS[:count]
    await asyncio.wait_for(frontend.ended.wait(), 10)


async def test_closing_an_async_stream_aborts_its_request(address, frontend):
    async with AsyncClient(address) as client:
        async with client.chat("forever") as stream:
            assert (await anext(stream)).text == WORDS[0]
        await asyncio.wait_for(frontend.ended.wait(), 10)
        assert [chunk async for chunk in stream] == []


async def test_cancelling_the_reading_task_aborts_its_request(address, frontend):
    async with AsyncClient(address) as client:
        task = asyncio.ensure_future(client.chat("forever").result())
        await asyncio.wait_for(frontend.started.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(frontend.ended.wait(), 10)


async def test_tokens_models_and_aborts(address, frontend):
    async with AsyncClient(address) as client:
        tokens = await client.tokenize("ab", return_tokens=True)
        assert (tokens.token_ids, tokens.tokens, tokens.max_model_len) == ((1, 2), ("a", "b"), 64)
        await client.tokenize([{"role": "user", "content": "hi"}], add_special_tokens=False)
        assert frontend.requests[-1].conversation.messages[0].content == "hi"
        assert not frontend.requests[-1].add_special_tokens
        with pytest.raises(TaktClientError, match="unknown model"):
            await client.tokenize("ab", model="who")
        assert await client.detokenize([1, 2], skip_special_tokens=False) == "ab"
        models = await client.list_models()
        assert [(m.name, m.root, m.max_model_len, m.num_ready_engines) for m in models] == [("m", "models/m", 64, 2)]
        assert await client.abort("r-1")
        assert not await client.abort("r-2")
    assert (await in_thread(address, lambda client: client.tokenize("ab"))).token_ids == (1, 2)
    assert await in_thread(address, lambda client: client.detokenize([1, 2])) == "ab"
    assert await in_thread(address, lambda client: client.list_models()) == models
    assert await in_thread(address, lambda client: client.abort("r-1"))


async def test_what_operators_ask(address):
    def run():
        with AdminClient(address) as client:
            load = client.get_load()
            assert load.num_requests == 3
            assert [(e.address, e.state, e.last_error) for e in load.engines] == [
                ("e:1", "ready", ""),
                ("e:2", "connecting", "refused"),
            ]
            assert client.ping()[0].value == 0.5
            assert client.reset_prefix_cache()[0].value is False
            assert client.reset_prefix_cache(reset_running_requests=True)[0].value is True
            assert client.start_profile("mine")[0].error == "no folder for mine"
            assert client.stop_profile()[0].value == "trace.json"
            assert client.drain() == 7

    await asyncio.to_thread(run)


async def test_every_output_is_put_together_with_all_it_has(address):
    outputs = await in_thread(address, lambda client: client.chat("rich").results())
    assert [(output.index, output.text, output.token_ids) for output in outputs] == [
        (0, "aA", (5, 5)),
        (1, "bB", (6, 7)),
    ]
    first = outputs[0]
    assert first.reasoning == "hmm"
    assert first.tool_calls == (ToolCall(0, "c", "f", '{"a": 1}'),)
    candidate = TokenCandidate(5, -0.5, 1, "\ufffd", b"\xc3")
    assert first.logprobs == (TokenLogprobs(candidate, (candidate,)),) * 2
    assert first.prompt_logprobs == (TokenLogprobs(None, ()), TokenLogprobs(candidate, (candidate,)))
    assert first.prompt_token_ids == (1, 2)
    async with AsyncClient(address) as client:
        assert await client.chat("rich").results() == outputs
        assert (await client.generate("rich").result()).text == "aA"


async def test_vectors(address, frontend):
    embeddings = await in_thread(address, lambda client: client.embed("ab", pooling="mean", normalize=True))
    assert embeddings.vectors == ((2.0, 0.5),)
    assert embeddings.usage == Usage(7, 0, 0)
    request = frontend.requests[-1]
    assert (list(request.texts), request.pooling, request.normalize) == (["ab"], "mean", True)
    async with AsyncClient(address) as client:
        assert (await client.embed(["a", "bcd"])).vectors == ((1.0, 0.5), (3.0, 0.5))


async def test_options_may_be_objects(address, frontend):
    tool = {"name": "f", "parameters": {"type": "object"}}
    call = ToolCall(0, "c", "f", "{}")
    messages = [
        {"role": "user", "content": ["rich", "x"], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "rich", "tool_call_id": "c"},
    ]
    options = {"tools": [tool, "{}"], "chat_template_kwargs": {"a": 1}, "output_kind": "cumulative", "n": 2}
    options |= {"structured_output": {"json_schema": tool}, "logit_bias": {5: -1.5}, "stop": "x"}
    await in_thread(address, lambda client: list(client.chat(messages, **options)))
    request = frontend.requests[-1]
    assert [part.text for part in request.messages[0].parts] == ["rich", "x"]
    assert request.messages[0].name == "ann"
    assert request.messages[1].tool_calls[0].name == "f"
    assert (request.messages[1].reasoning, request.messages[2].tool_call_id) == ("hm", "c")
    assert [json.loads(text) for text in request.tools] == [tool, {}]
    assert json.loads(request.chat_template_kwargs) == {"a": 1}
    sampling = request.sampling
    assert (sampling.n, sampling.output_kind, list(sampling.stop)) == (2, types_pb2.OUTPUT_KIND_CUMULATIVE, ["x"])
    assert json.loads(sampling.structured_output.json_schema) == tool
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(5, -1.5)]
    await in_thread(address, lambda client: list(client.generate("x", structured_output={"choice": ["a", "b"]})))
    assert list(frontend.requests[-1].sampling.structured_output.choice.choices) == ["a", "b"]
    with pytest.raises(TaktClientError, match="exactly one constraint, got 2"):
        await in_thread(address, lambda client: client.generate("x", structured_output={"regex": "a", "choice": []}))
    with pytest.raises(TypeError, match="unknown key 'who'"):
        await in_thread(address, lambda client: client.chat([{"role": "user", "who": "x"}]))
