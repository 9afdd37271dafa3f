"""Conversations: messages, tools and reasoning in, OpenAI's messages and deltas out."""

import asyncio

import pytest

from takt.engine.v1 import engine_pb2 as pb
from tests.support.tiny_tokenizer import ids_of, write_tiny_tokenizer

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "wait"}},
]


@pytest.fixture
def ids(tokenizer_folder):
    return lambda text: ids_of(tokenizer_folder, text)


async def start(edge, **body):
    """Sends a chat; its task, and the request as the engine got it."""
    task = asyncio.create_task(edge.request(PATH, {"model": "tiny", "messages": HELLO} | body))
    return task, await edge.stream.add()


async def say(edge, add, *pieces):
    """The engine's answer, a step a piece."""
    for piece in pieces:
        await edge.stream.outputs({add.handle: piece})
    await edge.stream.finish(add.handle, [2], reason=1)


async def test_a_chat(edge, ids):
    task, add = await start(edge, max_completion_tokens=9, max_tokens=5)
    assert add.sampling.max_tokens == 9
    assert list(add.prompt_token_ids) == ids("<s>user: hi</s><s>assistant: ")
    await say(edge, add, ids("Hello!"))
    value = (await task).json
    assert value.pop("id").startswith("chatcmpl-")
    assert value.pop("created")
    assert value == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(add.prompt_token_ids),
            "completion_tokens": 7,
            "total_tokens": len(add.prompt_token_ids) + 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": None,
    }


async def test_a_stream_of_two_outputs(edge, ids):
    body = {"messages": HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "seed": 5}
    task = asyncio.create_task(edge.request(PATH, body))
    adds = [await edge.stream.add(), await edge.stream.add()]
    for index, add in enumerate(adds):
        assert add.sampling.seed == 5 + index
        await say(edge, add, ids(f"a{index}"), ids("b"))
    *chunks, last = (await task).events
    choices = [event["choices"][0] for event in chunks]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == f"a{index}b"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["prompt_tokens"] == len(adds[0].prompt_token_ids)


async def test_content_in_parts_and_other_messages(edge, ids):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]  # fmt: skip
    task, add = await start(edge, messages=messages)
    expected = "<s>system: be\nkind</s><s>user: hi</s><s>assistant: </s><s>tool: seen</s><s>assistant: "
    assert list(add.prompt_token_ids) == ids(expected)
    await say(edge, add)
    assert (await task).status == 200


async def test_the_final_message_is_continued(edge, ids):
    messages = [*HELLO, {"role": "assistant", "content": "Sure"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    task, add = await start(edge, messages=messages, **options)
    assert list(add.prompt_token_ids) == ids("<s>user: hi</s><s>assistant: Sure")
    await say(edge, add)
    assert (await task).status == 200


async def test_template_variables(make_edge, tmp_path):
    template = "{{ messages[0]['content'] }}{{ mood }}{{ reasoning_effort }}"
    folder = write_tiny_tokenizer(tmp_path / "moody", chat_template=template)
    async with make_edge(chat_template=template) as edge:
        task, add = await start(edge, chat_template_kwargs={"mood": "!"}, reasoning_effort="low")
        assert list(add.prompt_token_ids) == ids_of(folder, "hi!low")
        await say(edge, add)
        assert (await task).status == 200


async def test_calls_that_the_model_makes_of_itself(edge, ids):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    task, add = await start(edge, tools=TOOLS)
    await say(edge, add, ids("Well. "), ids(call))
    (choice,) = (await task).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (found,) = choice["message"]["tool_calls"]
    assert found["id"]
    assert found["type"] == "function"
    assert found["function"]["name"] == "look"
    assert found["function"]["arguments"].replace(" ", "") == '{"at":"x"}'
    assert choice["message"]["content"].strip() == "Well."


async def test_calls_in_a_stream(edge, ids):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    task, add = await start(edge, tools=TOOLS, stream=True)
    await say(edge, add, *(ids(character) for character in call + "\n" + call))
    choices = [event["choices"][0] for event in (await task).events]
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", ())]
    for index in range(2):
        mine = [delta for delta in deltas if delta["index"] == index]
        assert (mine[0]["type"], mine[0]["function"]["name"]) == ("function", "look")
        assert all(set(delta) == {"index", "function"} for delta in mine[1:])
        assert "".join(delta["function"]["arguments"] for delta in mine).replace(" ", "") == '{"at":"x"}'
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_one_call_only(edge, ids):
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    task, add = await start(edge, tools=TOOLS, parallel_tool_calls=False)
    await say(edge, add, ids(call + "\n" + call))
    (choice,) = (await task).json["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_required_and_named_tools_are_constraints(edge, ids):
    task, add = await start(edge, tools=TOOLS, tool_choice="required")
    assert add.sampling.structured_output.kind == pb.STRUCTURED_OUTPUT_KIND_JSON_SCHEMA
    await say(edge, add, ids('[{"name": "wait", "parameters": {}}]'))
    (choice,) = (await task).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "wait", "arguments": "{}"}
    task, add = await start(edge, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "look"}})
    assert add.sampling.structured_output.spec == '{"type": "object", "properties": {}}'
    await say(edge, add, ids('{"at": 1}'))
    (choice,) = (await task).json["choices"]
    # The client named the function: what came is what it asked for, and an ordinary end.
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}


async def test_reasoning(make_edge, ids):
    async with make_edge(reasoning_parser="think") as edge:
        for stream in (False, True):
            for shown in (True, False):
                task, add = await start(edge, stream=stream, include_reasoning=shown)
                await say(edge, add, ids("<think>hm"), ids("m</think>yes"))
                answer = await task
                if stream:
                    parts = [event["choices"][0]["delta"] for event in answer.events]
                else:
                    parts = [answer.json["choices"][0]["message"]]
                assert "".join(part.get("reasoning_content", "") for part in parts) == ("hmm" if shown else "")
                assert "".join(part.get("content", "") for part in parts) == "yes"


async def test_logprobs(edge):
    task, add = await start(edge, logprobs=True, top_logprobs=1)
    assert add.sampling.logprobs == 1
    table = pb.LogprobsTable(
        handles=[add.handle], num_tokens=[1], widths=[2], token_ids=[70, 71], logprobs=[-1.5, -float("inf")], ranks=[1]
    )
    await edge.stream.outputs({add.handle: [70]}, logprobs=table)
    await edge.stream.finish(add.handle)
    (choice,) = (await task).json["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": "d",
            "logprob": -1.5,
            "bytes": [100],
            "top_logprobs": [{"token": "e", "logprob": -9999.0, "bytes": [101]}],
        }
    ]


async def test_token_ids_and_usage_in_a_stream(edge, ids):
    options = {"include_usage": True, "continuous_usage_stats": True}
    task, add = await start(edge, stream=True, return_token_ids=True, stream_options=options)
    await say(edge, add, ids("a"), ids("b"))
    *chunks, last = (await task).events
    assert chunks[0]["prompt_token_ids"] == list(add.prompt_token_ids)
    tokens = [token for event in chunks for token in event["choices"][0].get("token_ids", ())]
    assert tokens == [*ids("ab"), 2]
    assert all(event["usage"]["prompt_tokens"] == len(add.prompt_token_ids) for event in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 3
