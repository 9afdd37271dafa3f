"""Conversations: what the template gets, which constraint a choice of tools makes, how answers are read."""

import json

import pytest

from takt.v1 import inference_pb2, types_pb2
from tests.support.frontend_in_process import collect, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine
from tests.support.tiny_tokenizer import write_tiny_tokenizer

# Writes all that a message and a call can hold.
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if style %}S{{ style }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %}@{{ m.name }}{% endif %}"
    "{% if m.reasoning_content %}?{{ m.reasoning_content }}{% endif %}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TIME = {"type": "function", "function": {"name": "time"}}


def user(text="hi", **fields):
    return inference_pb2.ChatMessage(role="user", content=text, **fields)


@pytest.fixture
async def pair(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "tokenizer", chat_template=TEMPLATE)
    async with (
        scripted_engine(max_model_len=4_096) as engine,
        frontend_in_process(folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        yield await engine.stream(), frontend


async def rendered(frontend, stream, **fields):
    """The prompt that the engine gets."""
    call = frontend.stub.Chat(inference_pb2.ChatRequest(**fields))
    ids = list((await stream.add()).prompt_token_ids)
    call.cancel()
    return (
        await frontend.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
    ).text


async def test_the_template_gets_all_of_a_conversation(pair):
    stream, frontend = pair
    messages = [
        user("", parts=[inference_pb2.ContentPart(text="a"), inference_pb2.ContentPart(text="b")]),
        inference_pb2.ChatMessage(
            role="assistant",
            reasoning="why",
            tool_calls=[types_pb2.ToolCall(id="c1", name="weather", arguments='{"x": "Rome"}')],
        ),
        inference_pb2.ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
        user("go", name="ann"),
    ]
    text = await rendered(frontend, stream, messages=messages, chat_template_kwargs='{"style": "brief"}')
    assert text == "Sbrief[user:a\nb][assistant?why:!weatherRome][tool:sunny#c1][user@ann:go][assistant:"
    assert await rendered(frontend, stream, messages=[user()], add_generation_prompt=False) == "[user:hi]"


async def test_tools_are_given_as_templates_expect_them(pair):
    stream, frontend = pair
    tools = [json.dumps(WEATHER), json.dumps(TIME)]
    text = await rendered(frontend, stream, messages=[user()], tools=tools)
    given = [{"type": "function", "function": WEATHER}, TIME]
    assert text == f"T{json.dumps(given)}[user:hi][assistant:"
    assert (
        await rendered(frontend, stream, messages=[user()], tools=tools, tool_choice="none") == "[user:hi][assistant:"
    )


async def test_the_final_message_is_continued(pair):
    stream, frontend = pair
    messages = [user("hi hi"), inference_pb2.ChatMessage(role="assistant", content=" Well, hi ")]
    text = await rendered(frontend, stream, messages=messages, continue_final_message=True)
    assert text == "[user:hi hi][assistant: Well, hi "


async def test_templates_that_loop_over_parts_get_parts(tmp_path):
    template = "{% for m in messages %}{% for p in m.content %}<{{ p.type }}={{ p.text }}>{% endfor %}{% endfor %}"
    folder = write_tiny_tokenizer(tmp_path / "tokenizer", chat_template=template)
    async with scripted_engine() as engine, frontend_in_process(folder, engine.address) as frontend:
        await frontend.wait_ready()
        parts = [inference_pb2.ContentPart(text="a"), inference_pb2.ContentPart(text="b")]
        text = await rendered(frontend, await engine.stream(), messages=[user("", parts=parts)])
        assert text == "<text=a><text=b>"


async def test_a_choice_becomes_a_constraint(pair):
    stream, frontend = pair
    tools = [json.dumps(WEATHER), json.dumps(TIME)]

    async def constraint(**fields):
        call = frontend.stub.Chat(inference_pb2.ChatRequest(messages=[user()], tools=tools, **fields))
        sampling = (await stream.add()).sampling
        call.cancel()
        return sampling

    assert not (await constraint()).HasField("structured_output")
    named = (await constraint(tool_choice="weather")).structured_output
    assert (named.kind, json.loads(named.spec)) == (1, WEATHER["parameters"])
    required = (await constraint(tool_choice="required")).structured_output
    schema = json.loads(required.spec)
    assert (required.kind, schema["type"], schema["minItems"]) == (1, "array", 1)
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"type": "string", "enum": ["weather"]}, "parameters": WEATHER["parameters"]}
    assert second["properties"]["name"] == {"type": "string", "enum": ["time"]}
    assert second["required"] == ["name", "parameters"]


# --- answers ----------------------------------------------------------------------------------------------------------


async def told(stream, frontend, text, step=3, **fields):
    """The messages of an answer whose text comes in pieces."""
    ids = await frontend.answer_ids(text)
    call = frontend.stub.Chat(inference_pb2.ChatRequest(messages=[user()], **fields))
    handle = (await stream.add()).handle
    for start in range(0, len(ids), step):
        await stream.outputs({handle: ids[start : start + step]})
    await stream.finish(handle, [2], reason=1)
    answer = await collect(call)
    assert answer.error is None
    assert answer.token_ids == [*ids, 2]
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_STOP
    return answer


def calls_of(answer):
    """Name and arguments of each call; the first piece of each has its id and name."""
    found = {}
    for message in answer.messages:
        for piece in message.tool_calls:
            if piece.index not in found:
                assert piece.id.startswith("call_")
                found[piece.index] = [piece.name, ""]
            else:
                assert not piece.name
                assert not piece.id
            found[piece.index][1] += piece.arguments
    return [tuple(found[index]) for index in sorted(found)]


TOOLS = {"tools": [json.dumps(WEATHER), json.dumps(TIME)]}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"x": "</tool_call>}"}}\n</tool_call>'
    '<tool_call>{"arguments": {}, "name": "time"}</tool_call>'
)


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_calls_are_told_while_they_stream(pair, step):
    stream, frontend = pair
    answer = await told(stream, frontend, TWO_CALLS, step=step, **TOOLS)
    assert answer.text == "Let me see.\n"
    assert calls_of(answer) == [("weather", '{"x": "</tool_call>}"}'), ("time", "{}")]


async def test_a_call_is_told_before_it_is_complete(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids('<tool_call>{"name": "weather", "arguments": {"x": "Ro')
    call = frontend.stub.Chat(inference_pb2.ChatRequest(messages=[user()], **TOOLS))
    handle = (await stream.add()).handle
    await stream.outputs({handle: ids})
    message = await next_message(call)
    assert [piece.name for piece in message.tool_calls] == ["weather", ""]
    assert message.tool_calls[1].arguments == '{"x": "Ro'
    call.cancel()


async def test_without_tools_nothing_is_read(pair):
    stream, frontend = pair
    for fields in ({}, {**TOOLS, "tool_choice": "none"}):
        answer = await told(stream, frontend, TWO_CALLS, **fields)
        assert answer.text == TWO_CALLS
        assert not calls_of(answer)


async def test_what_is_no_call_stays_text(pair):
    stream, frontend = pair
    for text in ("<tool_call>no</tool_call> <tool", '<tool_call>{"arguments": 3}</tool_call>', "a < b <tool_call>"):
        answer = await told(stream, frontend, text, step=1, **TOOLS)
        assert answer.text == text
        assert not calls_of(answer)


async def test_enforced_calls(pair):
    stream, frontend = pair
    text = '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"x": "a]"}}]'
    answer = await told(stream, frontend, text, tool_choice="required", **TOOLS)
    assert (answer.text, calls_of(answer)) == ("", [("time", "{}"), ("weather", '{"x": "a]"}')])
    answer = await told(stream, frontend, '{"x": "Rome"}', tool_choice="weather", **TOOLS)
    assert (answer.text, calls_of(answer)) == ("", [("weather", '{"x": "Rome"}')])


async def test_one_message_holds_whole_calls(pair):
    stream, frontend = pair
    sampling = types_pb2.SamplingParams(output_kind=types_pb2.OUTPUT_KIND_FINAL_ONLY)
    answer = await told(stream, frontend, TWO_CALLS, sampling=sampling, **TOOLS)
    (message,) = answer.messages
    assert [(call.index, call.name, call.arguments) for call in message.tool_calls] == [
        (0, "weather", '{"x": "</tool_call>}"}'),
        (1, "time", "{}"),
    ]


REASONING = TEMPLATE + "{# </think> #}"


@pytest.mark.parametrize(
    ("template", "option", "text", "reasoning", "answer_text"),
    [
        (REASONING, "auto", "<think>a < b</think>\nyes", "a < b", "\nyes"),
        (REASONING, "auto", "\n<think>a", "a", ""),
        (REASONING, "auto", "no <think>a</think>", "", "no <think>a</think>"),
        (REASONING + "<think>\n", "auto", "a</thin</think>yes", "a</thin", "yes"),
        (REASONING, "none", "<think>a</think>yes", "", "<think>a</think>yes"),
        (TEMPLATE, "auto", "<think>a</think>yes", "", "<think>a</think>yes"),
        (TEMPLATE, "think", "<think>a</think>yes", "a", "yes"),
    ],
)
async def test_reasoning_is_told_apart(tmp_path, template, option, text, reasoning, answer_text):
    folder = write_tiny_tokenizer(tmp_path / "tokenizer", chat_template=template)
    async with (
        scripted_engine() as engine,
        frontend_in_process(folder, engine.address, reasoning_parser=option) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        for step in (1, 4, 100):
            answer = await told(stream, frontend, text, step=step)
            assert "".join(message.reasoning for message in answer.messages) == reasoning
            assert answer.text == answer_text


async def test_reasoning_then_a_call(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "tokenizer", chat_template=REASONING)
    async with scripted_engine(max_model_len=4_096) as engine, frontend_in_process(folder, engine.address) as frontend:
        await frontend.wait_ready()
        text = '<think>call <tool_call>?</think><tool_call>{"name": "time"}</tool_call>'
        answer = await told(await engine.stream(), frontend, text, step=1, **TOOLS)
        assert "".join(message.reasoning for message in answer.messages) == "call <tool_call>?"
        assert (answer.text, calls_of(answer)) == ("", [("time", "{}")])


async def test_llamas_calls(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "tokenizer", chat_template=TEMPLATE)
    async with (
        scripted_engine(max_model_len=4_096) as engine,
        frontend_in_process(folder, engine.address, tool_call_parser="llama3_json") as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        text = '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"x": 1}}'
        for step in (1, 100):
            answer = await told(stream, frontend, text, step=step, **TOOLS)
            assert (answer.text, calls_of(answer)) == ("", [("time", "{}"), ("weather", '{"x": 1}')])
            for plain in ("It is noon.", '{"x": 1}', ""):
                assert (await told(stream, frontend, plain, step=step, **TOOLS)).text == plain
