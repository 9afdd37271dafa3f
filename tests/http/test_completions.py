"""Text completions: what is asked reaches the engine, and what it says comes back in OpenAI's shape."""

import asyncio

import pytest

from takt.engine.v1 import engine_pb2 as pb
from tests.support.tiny_tokenizer import ids_of

PATH = "/v1/completions"


async def start(edge, **body):
    """Sends a completion; its task, and the request as the engine got it."""
    task = asyncio.create_task(edge.request(PATH, {"model": "tiny", "prompt": "ab"} | body))
    return task, await edge.stream.add()


def logprobs(handle, *rows):
    """A side table: each row is the ids of the token and the candidates; the log-probabilities are -1, -2, ..."""
    return pb.LogprobsTable(
        handles=[handle],
        num_tokens=[len(rows)],
        widths=[len(rows[0])],
        token_ids=[token for row in rows for token in row],
        logprobs=[-1.0 - column for row in rows for column in range(len(row))],
        ranks=[1] * len(rows),
    )


async def test_a_completion(edge, tokenizer_folder):
    task, add = await start(edge, temperature=0, max_tokens=5)
    assert list(add.prompt_token_ids) == ids_of(tokenizer_folder, "ab")
    assert (add.sampling.temperature, add.sampling.max_tokens) == (0, 5)
    await edge.stream.first(add.handle, cached=1)
    await edge.stream.outputs({add.handle: ids_of(tokenizer_folder, "hi")})
    await edge.stream.finish(add.handle, ids_of(tokenizer_folder, "!"))
    answer = await task
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    value = answer.json
    assert value.pop("id").startswith("cmpl-")
    assert value.pop("created") > 1_700_000_000
    assert value == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "hi!", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "system_fingerprint": None,
    }


async def test_a_stream(edge, tokenizer_folder):
    task, add = await start(edge, stream=True, stream_options={"include_usage": True})
    for text in "hi":
        await edge.stream.outputs({add.handle: ids_of(tokenizer_folder, text)})
        await asyncio.sleep(0.01)
    await edge.stream.finish(add.handle, [2], reason=1)
    events = (await task).events
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert {event["object"] for event in events} == {"text_completion"}
    *chunks, last = events
    assert "".join(event["choices"][0]["text"] for event in chunks) == "hi"
    assert [event["choices"][0]["finish_reason"] for event in chunks][-1] == "stop"
    assert all("usage" not in event for event in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


async def test_continuous_usage_and_token_ids(edge):
    options = {"include_usage": True, "continuous_usage_stats": True}
    task, add = await start(edge, stream=True, stream_options=options, return_token_ids=True)
    await edge.stream.finish(add.handle, [70, 71])
    *chunks, last = (await task).events
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [67, 68]
    assert [token for event in chunks for token in event["choices"][0]["token_ids"]] == [70, 71]
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert last["usage"]["completion_tokens"] == 2


async def test_max_tokens_unset_is_openais_and_null_is_all_there_is(edge):
    for body, expected in (({}, 16), ({"max_tokens": None}, 254), ({"max_tokens": 7.0}, 7)):
        task, add = await start(edge, **body)
        assert add.sampling.max_tokens == expected
        await edge.stream.finish(add.handle)
        assert (await task).status == 200


# name and value in the body, field of the engine's SamplingParams, what it is there.
OPTIONS = [
    ("temperature", 0.5, "temperature", 0.5),
    ("top_p", 0.25, "top_p", 0.25),
    ("top_k", 5, "top_k", 5),
    ("min_p", 0.5, "min_p", 0.5),
    ("seed", 7, "seed", 7),
    ("min_tokens", 3, "min_tokens", 3),
    ("stop_token_ids", [5, 6], "stop_token_ids", [5, 6]),
    ("ignore_eos", True, "ignore_eos", True),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("frequency_penalty", -0.5, "frequency_penalty", -0.5),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("logit_bias", {"7": -2, "8": 1.5}, "logit_bias_token_ids", [7, 8]),
    ("logit_bias", {"7": -2, "8": 1.5}, "logit_bias_values", [-2.0, 1.5]),
    ("allowed_token_ids", [7, 8], "allowed_token_ids", [7, 8]),
    ("logprobs", 3, "logprobs", 3),
    ("prompt_logprobs", 2, "prompt_logprobs", 2),
    ("logprob_token_ids", [7], "logprob_token_ids", [7]),
    ("repetition_detection", {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}, "repetition_detection",
     pb.RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=3)),
    ("skip_reading_prefix_cache", True, "skip_reading_prefix_cache", True),
    ("response_format", {"type": "json_object"}, "structured_output", pb.StructuredOutput(kind=2)),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
     "structured_output", pb.StructuredOutput(kind=1, spec='{"type": "object"}')),
    ("response_format", {"type": "structural_tag", "format": {"type": "any_text"}}, "structured_output",
     pb.StructuredOutput(kind=6, spec='{"type": "structural_tag", "format": {"type": "any_text"}}')),
    ("structured_outputs", {"json": {"type": "object"}}, "structured_output",
     pb.StructuredOutput(kind=1, spec='{"type": "object"}')),
    ("structured_outputs", {"json": '{"type": "object"}'}, "structured_output",
     pb.StructuredOutput(kind=1, spec='{"type": "object"}')),
    ("structured_outputs", {"json_object": True}, "structured_output", pb.StructuredOutput(kind=2)),
    ("structured_outputs", {"regex": "a+"}, "structured_output", pb.StructuredOutput(kind=3, spec="a+")),
    ("structured_outputs", {"choice": ["ä", "b"]}, "structured_output",
     pb.StructuredOutput(kind=4, spec='["ä", "b"]')),
    ("structured_outputs", {"grammar": "root"}, "structured_output", pb.StructuredOutput(kind=5, spec="root")),
    ("guided_regex", "a+", "structured_output", pb.StructuredOutput(kind=3, spec="a+")),
    ("guided_choice", ["a"], "structured_output", pb.StructuredOutput(kind=4, spec='["a"]')),
]  # fmt: skip
# Fields that mean something to the frontend alone, or to nobody.
TAKEN = [
    {"n": 1, "best_of": 1},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"include_stop_str_in_output": True},
    {"bad_words": ["x"]},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": 1},
    {"priority": -5, "cache_salt": "salt"},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "unheard_of": {"a": 1}},
    {"suffix": None, "use_beam_search": False, "response_format": {"type": "text"}},
]


async def test_options_reach_the_engine(edge):
    for option, value, name, expected in OPTIONS:
        task, add = await start(edge, **{option: value})
        found = getattr(add.sampling, name)
        assert (list(found) if isinstance(expected, list) else found) == expected, option
        await edge.stream.finish(add.handle)
        answer = await task
        assert answer.status == 200, (option, answer.body)
    for body in TAKEN:
        task, add = await start(edge, **body)
        await edge.stream.finish(add.handle)
        answer = await task
        assert answer.status == 200, (body, answer.body)


async def test_priority_salt_and_trace_reach_the_engine(edge):
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    body = {"prompt": "ab", "priority": -5, "cache_salt": "salt"}
    task = asyncio.create_task(edge.request(PATH, body, headers={"traceparent": trace, "X-Request-Id": "mine"}))
    add = await edge.stream.add()
    assert (add.priority, add.cache_salt, add.traceparent) == (-5, "salt", trace)
    assert add.request_id.startswith("cmpl-mine-")
    await edge.stream.finish(add.handle)
    answer = await task
    assert answer.json["id"] == "cmpl-mine"
    assert answer.headers["x-request-id"] == "mine"


async def test_several_prompts_of_several_outputs(edge, tokenizer_folder):
    task = asyncio.create_task(edge.request(PATH, {"prompt": ["a", "bc"], "n": 2, "echo": True, "temperature": 1}))
    adds = [await edge.stream.add() for _ in range(4)]
    assert len({add.request_id for add in adds}) == 4
    texts = {}
    for number, add in enumerate(adds):
        text = str(number)
        texts.setdefault(bytes(add.prompt_token_ids), []).append(text)
        await edge.stream.finish(add.handle, ids_of(tokenizer_folder, text))
    value = (await task).json
    assert [choice["index"] for choice in value["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:-1] for choice in value["choices"]] == ["a", "a", "bc", "bc"]
    assert value["usage"]["prompt_tokens"] == 3
    assert value["usage"]["completion_tokens"] == 4


async def test_several_prompts_in_one_stream(edge, tokenizer_folder):
    prompts = [[68, 69], [70]]
    body = {"prompt": prompts, "stream": True, "stream_options": {"include_usage": True}}
    task = asyncio.create_task(edge.request(PATH, body))
    adds = {tuple(add.prompt_token_ids): add for add in [await edge.stream.add(), await edge.stream.add()]}
    for index, prompt in enumerate(prompts):
        await edge.stream.finish(adds[tuple(prompt)].handle, ids_of(tokenizer_folder, str(index)))
    *chunks, last = (await task).events
    texts = {0: "", 1: ""}
    for event in chunks:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "0", 1: "1"}
    assert last["usage"]["prompt_tokens"] == 3


async def test_a_failure_of_one_prompt_ends_all(edge):
    task = asyncio.create_task(edge.request(PATH, {"prompt": ["a", "bc"]}))
    adds = [await edge.stream.add(), await edge.stream.add()]
    await edge.stream.finish(
        adds[0].handle, reason=4, error=pb.EngineError(code=8, message="full", reason="OVERLOADED")
    )
    answer = await task
    assert answer.status == 429
    assert answer.error["code"] == "overloaded"
    assert (await edge.stream.abort())[0] == adds[1].handle
    await edge.frontend.idle()


async def test_logprobs(edge):
    task, add = await start(edge, logprobs=1)
    await edge.stream.outputs({add.handle: [70, 71]}, logprobs=logprobs(add.handle, [70, 71], [71, 71]))
    await edge.stream.finish(add.handle)
    (choice,) = (await task).json["choices"]
    assert choice["logprobs"] == {
        "tokens": ["d", "e"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"e": -2.0, "d": -1.0}, {"e": -2.0}],
        "text_offset": [0, 1],
    }


async def test_the_prompt_alone_with_its_logprobs(edge):
    task, add = await start(edge, echo=True, logprobs=1, max_tokens=0)
    assert (add.sampling.max_tokens, add.sampling.prompt_logprobs) == (1, 1)
    await edge.stream.outputs(prompt_logprobs=logprobs(add.handle, [68, 69]))
    await edge.stream.outputs({add.handle: [72]}, logprobs=logprobs(add.handle, [72, 72]))
    await edge.stream.finish(add.handle)
    value = (await task).json
    (choice,) = value["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"c": -2.0, "b": -1.0}],
        "text_offset": [0, 1],
    }
    assert value["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_as_vllm_writes_them(edge):
    task, add = await start(edge, prompt_logprobs=1)
    await edge.stream.outputs(prompt_logprobs=logprobs(add.handle, [68, 69]))
    await edge.stream.finish(add.handle, [72])
    (choice,) = (await task).json["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "68": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            "69": {"logprob": -2.0, "rank": 1, "decoded_token": "c"},
        },
    ]


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        (1, {}, ("stop", None)),
        (1, {"stop_token_id": 70}, ("stop", 70)),
        (2, {}, ("length", None)),
        (3, {}, ("abort", None)),
        (5, {}, ("repetition", "repetition_detected")),
    ],
)
async def test_ends(edge, reason, fields, expected):
    task, add = await start(edge, stop_token_ids=[70])
    await edge.stream.finish(add.handle, [70], reason=reason, **fields)
    (choice,) = (await task).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == expected


async def test_a_stop_string(edge, tokenizer_folder):
    task, add = await start(edge, stop="lo")
    await edge.stream.outputs({add.handle: ids_of(tokenizer_folder, "hello")})
    (choice,) = (await task).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hel", "stop", "lo")


async def test_an_error_behind_the_first_event_is_an_event(edge):
    task, add = await start(edge, stream=True)
    await edge.stream.outputs({add.handle: [70]})
    await edge.stream.finish(add.handle, reason=4, error=pb.EngineError(code=13, message="broken", reason="INTERNAL"))
    answer = await task
    assert answer.status == 200
    *chunks, last = answer.events
    assert "".join(event["choices"][0]["text"] for event in chunks) == "d"
    assert all(event["choices"][0]["finish_reason"] is None for event in chunks)
    assert last == {"error": {"message": "broken", "type": "server_error", "param": None, "code": "internal"}}


async def test_an_error_behind_the_first_token_fails_an_answer_that_is_whole(edge):
    task, add = await start(edge)
    await edge.stream.outputs({add.handle: [70]})
    await edge.stream.finish(add.handle, reason=4, error=pb.EngineError(code=13, message="broken", reason="INTERNAL"))
    answer = await task
    assert (answer.status, answer.error["message"]) == (500, "broken")
