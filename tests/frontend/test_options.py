"""Every option of the sampling, row by row: what is taken and what the engine is told, what is refused and how."""

import math

import grpc
import pytest

from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import types_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import collect, frontend_in_process
from tests.support.scripted_engine import scripted_engine
from tests.support.tiny_tokenizer import VOCAB_SIZE

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def pair(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        await frontend.wait_ready()
        yield await engine.stream(), frontend


def bias(*pairs):
    return [types_pb2.LogitBias(token_id=token_id, bias=value) for token_id, value in pairs]


def loops(**fields):
    return types_pb2.RepetitionDetection(**({"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3} | fields))


def constraint(**fields):
    return types_pb2.StructuredOutput(**fields)


def choices(*texts):
    return constraint(choice=types_pb2.ChoiceConstraint(choices=texts))


# option, value, field of the engine's SamplingParams, what it is there. Values at both ends of each range.
TAKEN = [
    ("temperature", 0.0, "temperature", 0.0),
    ("temperature", 9e-6, "temperature", 0.0),
    ("temperature", 0.005, "temperature", 0.01),
    ("temperature", 2.0, "temperature", 2.0),
    ("top_p", 1.0, "top_p", 1.0),
    ("top_p", 1e-9, "top_p", 1e-9),
    ("top_k", -1, "top_k", 0),
    ("top_k", 0, "top_k", 0),
    ("top_k", 2**31 - 1, "top_k", 2**31 - 1),
    ("min_p", 0.0, "min_p", 0.0),
    ("min_p", 1.0, "min_p", 1.0),
    ("seed", 0, "seed", 0),
    ("seed", -2, "seed", 2**64 - 2),
    ("seed", 2**63 - 1, "seed", 2**63 - 1),
    ("max_tokens", 1, "max_tokens", 1),
    ("max_tokens", 10_000, "max_tokens", 255),
    ("min_tokens", 0, "min_tokens", 0),
    ("min_tokens", 255, "min_tokens", 255),
    ("stop_token_ids", [299, 0, 299], "stop_token_ids", [299, 0]),
    ("ignore_eos", True, "ignore_eos", True),
    ("presence_penalty", -2.0, "presence_penalty", -2.0),
    ("presence_penalty", 2.0, "presence_penalty", 2.0),
    ("frequency_penalty", -2.0, "frequency_penalty", -2.0),
    ("frequency_penalty", 2.0, "frequency_penalty", 2.0),
    ("repetition_penalty", 0.1, "repetition_penalty", 0.1),
    ("repetition_penalty", 50.0, "repetition_penalty", 50.0),
    ("logit_bias", bias((299, -1.5), (0, 2.0)), "logit_bias_token_ids", [299, 0]),
    ("logit_bias", bias((5, -1e9), (6, 101.0), (7, 100.0)), "logit_bias_values", [-100.0, 100.0, 100.0]),
    ("logit_bias", bias((5, math.inf)), "logit_bias_values", [100.0]),
    ("logit_bias", bias((5, 1.0), (5, 2.0)), "logit_bias_values", [2.0]),
    ("allowed_token_ids", [299, 0, 0], "allowed_token_ids", [299, 0]),
    ("logprobs", 0, "logprobs", 0),
    ("logprobs", 20, "logprobs", 20),
    ("prompt_logprobs", 0, "prompt_logprobs", 0),
    ("prompt_logprobs", 20, "skip_reading_prefix_cache", True),
    ("logprob_token_ids", [299, 1], "logprob_token_ids", [299, 1]),
    ("logprob_token_ids", [299, 1], "logprobs", 2),
    ("logprob_token_ids", list(range(128)), "logprobs", 128),
    ("repetition_detection", loops(min_pattern_size=0), "repetition_detection",
     pb.RepetitionDetection(max_pattern_size=4, min_pattern_size=1, min_count=3)),
    ("repetition_detection", loops(max_pattern_size=1024, min_count=2), "repetition_detection",
     pb.RepetitionDetection(max_pattern_size=1024, min_pattern_size=1, min_count=2)),
    ("structured_output", constraint(json_schema='{"type": "object"}'), "structured_output",
     pb.StructuredOutput(kind=1, spec='{"type": "object"}')),
    ("structured_output", constraint(json_object=True), "structured_output", pb.StructuredOutput(kind=2)),
    ("structured_output", constraint(regex="a+"), "structured_output", pb.StructuredOutput(kind=3, spec="a+")),
    ("structured_output", choices("ä", "b"), "structured_output", pb.StructuredOutput(kind=4, spec='["ä", "b"]')),
    ("structured_output", constraint(grammar='root ::= "a"'), "structured_output",
     pb.StructuredOutput(kind=5, spec='root ::= "a"')),
    ("structured_output", constraint(structural_tag='{"triggers": []}'), "structured_output",
     pb.StructuredOutput(kind=6, spec='{"triggers": []}')),
    ("structured_output", constraint(json_schema='{"a":' * 64 + "1" + "}" * 64), "structured_output",
     pb.StructuredOutput(kind=1, spec='{"a":' * 64 + "1" + "}" * 64)),
    ("structured_output", constraint(regex="x" * 65_536), "structured_output",
     pb.StructuredOutput(kind=3, spec="x" * 65_536)),
    ("skip_reading_prefix_cache", True, "skip_reading_prefix_cache", True),
    ("skip_reading_prefix_cache", False, "skip_reading_prefix_cache", False),
    ("n", 1, "max_tokens", 255),
    ("stream_interval", 1, "max_tokens", 255),
    ("skip_special_tokens", False, "max_tokens", 255),
    ("spaces_between_special_tokens", False, "max_tokens", 255),
    ("detokenize", False, "max_tokens", 255),
    ("output_kind", 0, "max_tokens", 255),
    ("output_kind", 3, "max_tokens", 255),
    ("truncate_prompt_tokens", 1, "max_tokens", 255),
    ("stop", ["x"] * 16, "max_tokens", 255),
    ("stop", ["x" * 256], "max_tokens", 255),
    ("bad_words", [chr(0x4E00 + index) for index in range(128)], "max_tokens", 255),
]  # fmt: skip


async def test_what_is_taken_reaches_the_engine(pair):
    stream, frontend = pair
    for option, value, name, expected in TAKEN:
        call = frontend.generate("a", **{option: value})
        request = await stream.add()
        found = getattr(request.sampling, name)
        found = list(found) if isinstance(expected, list) else found
        assert found == expected, (option, value)
        await stream.finish(request.handle)
        answer = await collect(call)
        assert answer.error is None, (option, value)
        assert answer.last.finish_reason == types_pb2.FINISH_REASON_LENGTH


# option, value, what the error must say.
REFUSED = [
    ("n", 0, "n must be in [1, 128], got 0"),
    ("n", 129, "n must be in [1, 128], got 129"),
    ("presence_penalty", -2.1, "presence_penalty must be a finite number in [-2, 2], got -2.1"),
    ("presence_penalty", math.nan, "presence_penalty must be a finite number in [-2, 2], got nan"),
    ("frequency_penalty", 2.1, "frequency_penalty must be a finite number in [-2, 2], got 2.1"),
    ("frequency_penalty", -math.inf, "frequency_penalty must be a finite number in [-2, 2], got -inf"),
    ("repetition_penalty", 0.0, "repetition_penalty must be a finite number above 0, got 0.0"),
    ("repetition_penalty", math.inf, "repetition_penalty must be a finite number above 0, got inf"),
    ("logit_bias", bias((300, 1.0)), "logit_bias must be in [0, 300), got 300"),
    ("logit_bias", bias((-1, 1.0)), "logit_bias must be in [0, 300), got -1"),
    ("logit_bias", bias((1, math.nan)), "logit_bias must be numbers, got nan"),
    ("logit_bias", bias(*((1, 1.0),) * 1025), "logit_bias must be at most 1024 tokens, got 1025 tokens"),
    ("bad_words", [""], "bad_words[0] must be 1 to 256 bytes, got 0 bytes"),
    ("bad_words", ["  "], "bad_words[0] must be more than spaces, got 2 spaces"),
    ("bad_words", ["x"] * 129, "bad_words must be at most 128 words, got 129 words"),
    ("allowed_token_ids", [300], "allowed_token_ids must be in [0, 300), got 300"),
    ("logprobs", -2, "logprobs must be at least -1, got -2"),
    ("logprobs", -1, "logprobs must be in [0, max_logprobs 20], got -1"),
    ("logprobs", 21, "logprobs must be in [0, max_logprobs 20], got 21"),
    ("prompt_logprobs", -1, "prompt_logprobs must be in [0, max_logprobs 20], got -1"),
    ("prompt_logprobs", 21, "prompt_logprobs must be in [0, max_logprobs 20], got 21"),
    ("logprob_token_ids", [300], "logprob_token_ids must be in [0, 300), got 300"),
    ("logprob_token_ids", [1] * 129, "logprob_token_ids must be at most 128 ids, got 129 ids"),
    ("repetition_detection", loops(max_pattern_size=0),
     "repetition_detection.max_pattern_size must be in [1, 1024], got 0"),
    ("repetition_detection", loops(max_pattern_size=1025),
     "repetition_detection.max_pattern_size must be in [1, 1024], got 1025"),
    ("repetition_detection", loops(min_pattern_size=5),
     "repetition_detection.min_pattern_size must be in [0, max_pattern_size 4], got 5"),
    ("repetition_detection", loops(min_count=1), "repetition_detection.min_count must be in [2, 1024], got 1"),
    ("structured_output", constraint(), "structured_output must be exactly one of json_schema, json_object, regex"),
    ("structured_output", constraint(json_object=False), "structured_output must be exactly one of"),
    ("structured_output", constraint(json_schema=""), "structured_output.json_schema must be not empty"),
    ("structured_output", constraint(json_schema="{"), "structured_output.json_schema must be JSON"),
    ("structured_output", constraint(json_schema='{"a": NaN}'), "structured_output.json_schema must be JSON"),
    ("structured_output", constraint(json_schema="[]"), "structured_output.json_schema must be a JSON object"),
    ("structured_output", constraint(json_schema='{"a":' * 65 + "1" + "}" * 65),
     "structured_output.json_schema must be nested at most 64 deep, got 65"),
    ("structured_output", constraint(json_schema="[" * 30_000), "must be nested at most 64 deep, got 30000"),
    ("structured_output", constraint(regex=""), "structured_output.regex must be not empty"),
    ("structured_output", constraint(regex="a\0b"), "structured_output.regex must be free of NUL characters"),
    ("structured_output", constraint(regex="x" * 65_537), "structured_output.regex must be at most 65536 bytes"),
    ("structured_output", choices(), "structured_output.choice must be at least 1 string"),
    ("structured_output", choices("a", ""), "structured_output.choice[1] must be not empty"),
    ("structured_output", constraint(grammar=" "), "structured_output.grammar must be not empty"),
    ("structured_output", constraint(structural_tag="{" * 81), "structural_tag must be nested at most 80 deep"),
    ("output_kind", 4, "output_kind must be a known value, got 4"),
    ("stream_interval", 0, "stream_interval must be at least 1, got 0"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be at least 1, got 0"),
]  # fmt: skip


async def test_what_is_refused_is_named(pair):
    stream, frontend = pair
    for option, value, text in REFUSED:
        answer = await frontend.answer("a", **{option: value})
        assert answer.code == INVALID, (option, value, answer.error)
        assert text in answer.error.details(), (option, value, answer.error.details())
    assert stream.num_unread_adds == 0


async def test_options_that_exclude_each_other(pair):
    _, frontend = pair
    for fields, text in (
        ({"n": 2, "temperature": 0.0}, "n must be 1 with temperature 0, which gives equal outputs, got 2"),
        ({"stop": ["x"], "detokenize": False}, "stop must be empty when detokenize is false"),
        ({"logprobs": 3, "logprob_token_ids": [1, 2]}, "logprobs must be unset, or the number of logprob_token_ids 2"),
    ):
        answer = await frontend.answer("a", **fields)
        assert answer.code == INVALID
        assert text in answer.error.details()


async def test_bad_words_are_told_as_tokens_and_counted_so(pair):
    stream, frontend = pair
    call = frontend.generate("a", bad_words=["ab", " ab", "c"])
    request = await stream.add()
    words = [list(word.token_ids) for word in request.sampling.bad_words]
    ids = (await frontend.answer_ids("ab")), (await frontend.answer_ids("c"))
    assert words == [list(ids[0]), list(ids[1])]
    call.cancel()


async def test_caps_are_the_operators(tokenizer_folder):
    caps = {"max_n": 2, "max_logit_bias": 1, "max_bad_words": 1, "max_prompt_logprobs": 8}
    caps |= {"max_structured_output_bytes": 10, "max_structured_output_nesting": 2}
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address, **caps) as frontend,
    ):
        await frontend.wait_ready()
        for fields, text in (
            ({"n": 3}, "n must be in [1, 2], got 3"),
            ({"logit_bias": bias((1, 1.0), (2, 1.0))}, "at most 1 tokens"),
            ({"bad_words": ["a", "b"]}, "at most 1 words"),
            ({"prompt_logprobs": 2}, "so that a prompt of 3 tokens has at most 8 log-probabilities, got 2"),
            ({"structured_output": constraint(regex="x" * 11)}, "at most 10 bytes"),
            ({"structured_output": constraint(json_schema='{"a":[{}]}')}, "at most 2 deep"),
        ):
            answer = await frontend.answer("abc", **fields)
            assert answer.code == INVALID, fields
            assert text in answer.error.details()


async def test_the_last_tokens_of_a_prompt_are_kept(pair):
    stream, frontend = pair
    call = frontend.generate(list(range(3, 290)), truncate_prompt_tokens=4, return_prompt_token_ids=True)
    request = await stream.add()
    assert list(request.prompt_token_ids) == [286, 287, 288, 289]
    await stream.finish(request.handle, [9])
    assert list((await collect(call)).messages[0].prompt_token_ids) == [286, 287, 288, 289]


async def test_the_models_generation_config_gives_defaults(tokenizer_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tokenizer_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2, 7], "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, '
        '"repetition_penalty": 1.3, "max_new_tokens": 9}'
    )
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.0, "max_tokens": 255}
    own = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.3, "max_tokens": 9}
    for choice, expected in (("auto", own), ("vllm", neutral)):
        async with (
            scripted_engine() as engine,
            frontend_in_process(folder, engine.address, generation_config=choice) as frontend,
        ):
            await frontend.wait_ready()
            stream = await engine.stream()
            call = frontend.generate("a")
            sampling = (await stream.add()).sampling
            assert {name: getattr(sampling, name) for name in expected} == expected
            # End tokens are no default: they always hold.
            assert list(sampling.stop_token_ids) == [7]
            call.cancel()
            call = frontend.generate("a", temperature=1.5, top_k=-1, max_tokens=3)
            sampling = (await stream.add()).sampling
            assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (1.5, 0, 3)
            call.cancel()


# Each option at its largest.
LARGEST = [
    {"n": 128, "temperature": 1.0},
    {"n": 2, "request_id": "x" * 256},
    {"logprob_token_ids": list(range(128))},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"bad_words": [chr(0x4E00 + index) for index in range(128)]},
    {"bad_words": ["x" * 256]},
    {"logit_bias": bias(*((index % 250, 100.0) for index in range(1024)))},
    {"allowed_token_ids": list(range(250))},
    {"stop_token_ids": list(range(128))},
    {"repetition_detection": loops(max_pattern_size=1024, min_pattern_size=1024, min_count=1024)},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 1e-3},
]


async def test_engines_take_what_the_frontend_takes(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        for fields in LARGEST:
            answer = await frontend.answer("hello", max_tokens=3, **fields)
            assert answer.error is None, (list(fields), answer.error)
            assert any(message.HasField("finish_reason") for message in answer.messages)
