"""Bad input on the public port: each is refused with its status, naming field, limit and value, and hurts nobody."""

import math

import grpc
import pytest

from takt.v1 import inference_pb2, types_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import collect, error_info, frontend_in_process, generate_request

MAX_MODEL_LEN = 256
VOCAB = 300

INVALID, UNIMPLEMENTED, NOT_FOUND = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
)


@pytest.fixture
async def frontend(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN) as engine,
        frontend_in_process(tokenizer_folder, engine.address, max_prompt_bytes=10_000) as running,
    ):
        await running.wait_ready()
        yield running


# prompt, fields, code, what the message must contain
BAD = {
    "empty text": ("", {}, INVALID, "text must be at least 1 byte long, got 0 bytes"),
    "no tokens": ([], {}, INVALID, "token_ids must be at least 1 token long, got 0 tokens"),
    "long text": ("x" * 10_001, {}, INVALID, "text must be at most 10000 bytes, got 10001 bytes"),
    "text beyond the context": ("x" * 4_097, {}, INVALID, "at most 4096 bytes for max_model_len 256, got 4097 bytes"),
    "long prompt": ([5] * 257, {}, INVALID, "prompt must be shorter than max_model_len 256, got 257 tokens"),
    "full prompt": ([5] * 256, {}, INVALID, "prompt must be shorter than max_model_len 256, got 256 tokens"),
    "full text": ("x" * 256, {}, INVALID, "prompt must be shorter than max_model_len 256, got 256 tokens"),
    "token out of range": ([5, 300], {}, INVALID, "token_ids must be in [0, 300), got 300"),
    "temperature negative": ("a", {"temperature": -0.1}, INVALID, "temperature must be a finite number in [0, 2]"),
    "temperature high": ("a", {"temperature": 2.01}, INVALID, "in [0, 2], got 2.01"),
    "temperature nan": ("a", {"temperature": math.nan}, INVALID, "in [0, 2], got nan"),
    "temperature inf": ("a", {"temperature": math.inf}, INVALID, "in [0, 2], got inf"),
    "top_p zero": ("a", {"top_p": 0.0}, INVALID, "top_p must be a finite number in (0, 1], got 0.0"),
    "top_p high": ("a", {"top_p": 1.5}, INVALID, "top_p must be a finite number in (0, 1], got 1.5"),
    "top_p nan": ("a", {"top_p": math.nan}, INVALID, "got nan"),
    "min_p": ("a", {"min_p": -0.5}, INVALID, "min_p must be a finite number in [0, 1], got -0.5"),
    "top_k": ("a", {"top_k": -2}, INVALID, "top_k must be -1, 0 or more, below 2^31, got -2"),
    "top_k huge": ("a", {"top_k": 2**31}, INVALID, "got 2147483648"),
    "max_tokens zero": ("a", {"max_tokens": 0}, INVALID, "max_tokens must be at least 1, got 0"),
    "max_tokens negative": ("a", {"max_tokens": -5}, INVALID, "max_tokens must be at least 1, got -5"),
    "min_tokens negative": ("a", {"min_tokens": -1}, INVALID, "min_tokens must be at least 0, got -1"),
    "min_tokens": ("a", {"min_tokens": 5, "max_tokens": 4}, INVALID, "min_tokens must be at most max_tokens 4, got 5"),
    "min_tokens of the room": ("a", {"min_tokens": 256}, INVALID, "min_tokens must be at most max_tokens 255, got 256"),
    "empty stop": ("a", {"stop": ["x", ""]}, INVALID, "stop[1] must be 1 to 256 bytes long, got 0 bytes"),
    "long stop": ("a", {"stop": ["x" * 257]}, INVALID, "stop[0] must be 1 to 256 bytes long, got 257 bytes"),
    "many stops": ("a", {"stop": ["x"] * 17}, INVALID, "stop must be at most 16 strings, got 17 strings"),
    "many stop ids": ("a", {"stop_token_ids": [1] * 129}, INVALID, "stop_token_ids must be at most 128 ids, got 129"),
    "stop id": ("a", {"stop_token_ids": [300]}, INVALID, "stop_token_ids must be in [0, 300), got 300"),
    "stop id negative": ("a", {"stop_token_ids": [-1]}, INVALID, "stop_token_ids must be in [0, 300), got -1"),
    "output kind": ("a", {"output_kind": 77}, INVALID, "output_kind must be a known value, got 77"),
    "model": ("a", {"model": "other"}, NOT_FOUND, "model must be one of tiny, got 'other'"),
    "rank": ("a", {"data_parallel_rank": 3}, INVALID, "data_parallel_rank must be one of [0], got 3"),
    "request id": ("a", {"request_id": "x" * 257}, INVALID, "request_id must be at most 256 bytes, got 257 bytes"),
    "request id for logs": ("a", {"request_id": "a\nb"}, INVALID, r"request_id must be printable, got 'a\nb'"),
    "salt": ("a", {"cache_salt": "x" * 1025}, INVALID, "cache_salt must be at most 1024 bytes, got 1025 bytes"),
    "lora": ("a", {"lora_name": "x"}, UNIMPLEMENTED, "lora_name is not built yet"),
}  # fmt: skip


async def test_bad_values_are_refused_by_name_and_nobody_else_notices(frontend):
    neighbour = frontend.generate([7, 8, 9], seed=1, max_tokens=200, ignore_eos=True)
    await neighbour.read()
    for name, (prompt, fields, code, text) in BAD.items():
        request = generate_request(prompt, **fields)
        answer = await collect(frontend.stub.Generate(request))
        assert answer.code == code, f"{name}: {answer.error}"
        assert not answer.messages, name
        assert text in answer.error.details(), name
        assert answer.info.domain == "takt", name
    rest = await collect(neighbour)
    assert rest.error is None
    assert rest.last.usage.completion_tokens == 200
    await frontend.idle()
    assert frontend.metric("takt_frontend_aborts_total", cause="client") == 0


async def test_a_request_without_a_prompt_is_refused(frontend):
    answer = await collect(frontend.stub.Generate(inference_pb2.GenerateRequest()))
    assert answer.code == INVALID
    assert "prompt must be set to text or token_ids, got none" in answer.error.details()


async def test_fields_at_their_defaults_are_taken(frontend):
    answer = await frontend.answer(
        "a",
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        detokenize=True,
        output_kind=types_pb2.OUTPUT_KIND_DELTA,
        stream_interval=1,
        skip_reading_prefix_cache=False,
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        seed=-1,
        min_tokens=0,
        max_tokens=2,
        model="tiny",
    )
    assert answer.error is None
    assert answer.last.usage.completion_tokens == 2


async def test_one_token_below_the_limit_gives_one_token(frontend):
    answer = await frontend.answer([5] * (MAX_MODEL_LEN - 1), ignore_eos=True)
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert answer.last.usage.completion_tokens == 1


async def test_min_tokens_beyond_the_room_ends_by_length(frontend):
    answer = await frontend.answer([5] * 250, min_tokens=50, max_tokens=100)
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert answer.last.usage.completion_tokens == 6


MALFORMED = {
    "random": b"\xff\xfe\xfd\xfc",
    "cut off": generate_request("hello").SerializeToString()[:-1],
    "invalid UTF-8": b"\x1a\x02\xff\xfe",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_bytes_that_are_no_request_are_invalid(frontend, data):
    call = frontend.channel.unary_stream("/takt.v1.InferenceService/Generate")(data)
    answer = await collect(call)
    assert answer.code == INVALID
    assert "takt.v1.GenerateRequest" in answer.error.details()


async def test_other_calls_check_their_input_too(frontend):
    stub = frontend.stub
    cases = [
        (stub.Tokenize(inference_pb2.TokenizeRequest()), INVALID, "input must be set"),
        (stub.Tokenize(inference_pb2.TokenizeRequest(text="a", model="x")), NOT_FOUND, "model must be one of tiny"),
        (stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 10_001)), INVALID, "text must be at most 10000 bytes"),
        (stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[3] * (2**20 + 1))), INVALID, "at most 1048576 ids"),
        (stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[259])), INVALID, "in [0, 259), got 259"),
        (stub.Embed(inference_pb2.EmbedRequest()), INVALID, "texts must be 1 to 2048 texts, got 0 texts"),
        (stub.Embed(inference_pb2.EmbedRequest(texts=["a", ""])), INVALID, "texts[1] must be at least 1 byte long"),
        (stub.Embed(inference_pb2.EmbedRequest(texts=["a"], pooling="max")), INVALID, "pooling must be last or mean"),
        (stub.Embed(inference_pb2.EmbedRequest(texts=["a"], model="x")), NOT_FOUND, "model must be one of tiny"),
        (stub.Embed(inference_pb2.EmbedRequest(texts=["x" * 256])), INVALID, "texts[0] must be shorter than"),
    ]
    for call, code, text in cases:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() == code
        assert text in failure.value.details()
        assert error_info(failure.value).domain == "takt"


TOOL = '{"name": "f", "parameters": {"type": "object"}}'


def user(**fields):
    return {"messages": [inference_pb2.ChatMessage(role="user", content="a")], **fields}


CHAT_BAD = {
    "none": ({}, INVALID, "messages must be 1 to 4096 messages, got 0 messages"),
    "role": (
        {"messages": [inference_pb2.ChatMessage(content="a")]},
        INVALID,
        "messages[0].role must be 1 to 64 bytes, got 0 bytes",
    ),
    "tools": (user(tools=["{"]), INVALID, "tools[0] must be JSON"),
    "tool that is no object": (user(tools=["[]"]), INVALID, "tools[0] must be a JSON object, got a list"),
    "tool without a name": (user(tools=["{}"]), INVALID, "tools[0].name must be 1 to 64 letters"),
    "tool twice": (user(tools=[TOOL, TOOL]), INVALID, "tools[1].name must be unique, got f"),
    "parameters": (
        user(tools=['{"name": "f", "parameters": 3}']),
        INVALID,
        "tools[0].parameters must be a JSON object",
    ),
    "choice without tools": (user(tool_choice="auto"), INVALID, "tool_choice must be none without tools, got auto"),
    "unknown choice": (
        user(tools=[TOOL], tool_choice="g"),
        INVALID,
        "tool_choice must be none, auto, required or the name of a tool, got g",
    ),
    "two constraints": (
        user(
            tools=[TOOL],
            tool_choice="required",
            sampling=types_pb2.SamplingParams(structured_output=types_pb2.StructuredOutput(regex="a")),
        ),
        INVALID,
        "structured_output must be unset with tool_choice required",
    ),
    "deep tool": (user(tools=["[" * 65 + "]" * 65]), INVALID, "tools[0] must be nested at most 64 deep, got 65"),
    "kwargs": (user(chat_template_kwargs="3"), INVALID, "chat_template_kwargs must be a JSON object, got a int"),
    "reserved kwargs": (
        user(chat_template_kwargs='{"messages": []}'),
        INVALID,
        "chat_template_kwargs must not set 'messages'",
    ),
    "special kwargs": (user(chat_template_kwargs='{"bos_token": ""}'), INVALID, "must not set 'bos_token'"),
    "continue and open": (
        user(continue_final_message=True, add_generation_prompt=True),
        INVALID,
        "add_generation_prompt must be false with continue_final_message",
    ),
    "continue nothing": (
        {"messages": [inference_pb2.ChatMessage(role="assistant")], "continue_final_message": True},
        INVALID,
        "continue_final_message must be false for an empty message",
    ),
    "parts and content": (
        {
            "messages": [
                inference_pb2.ChatMessage(role="user", content="a", parts=[inference_pb2.ContentPart(text="b")])
            ]
        },
        INVALID,
        "messages[0].parts must be unset when content is set",
    ),
    "empty part": (
        {"messages": [inference_pb2.ChatMessage(role="user", parts=[inference_pb2.ContentPart()])]},
        INVALID,
        "messages[0].parts[0] must be text",
    ),
}


@pytest.mark.parametrize(("fields", "code", "text"), CHAT_BAD.values(), ids=CHAT_BAD)
async def test_bad_conversations(frontend, fields, code, text):
    answer = await collect(frontend.stub.Chat(inference_pb2.ChatRequest(**fields)))
    assert answer.code == code
    assert text in answer.error.details()


async def test_the_prompt_is_never_repeated(frontend):
    secret = "correct horse battery staple " * 200
    answer = await frontend.answer(secret)
    assert answer.code == INVALID
    assert "horse" not in str(answer.error.details())
