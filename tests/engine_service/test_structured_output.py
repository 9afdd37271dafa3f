"""Constrained requests over the engine's stream, with a real core thread and real grammars."""

import re

import psutil
import pytest

from takt.engine.v1 import engine_pb2 as pb
from tests.support.byte_tokenizer import VOCAB_SIZE, decode_bytes, encode_bytes, write_byte_model
from tests.support.engine_in_process import engine_in_process
from tests.support.engine_process import EngineSubprocess
from tests.support.raw_frontend import raw_frontend

REGEX = pb.STRUCTURED_OUTPUT_KIND_REGEX


def regex(text):
    return pb.StructuredOutput(kind=REGEX, spec=text)


@pytest.fixture
def model(tmp_path):
    return str(write_byte_model(tmp_path / "bytes"))


def fields(model):
    return {"model": model, "vocab_size": VOCAB_SIZE, "eos_token_ids": (2,)}


async def test_constrained_and_free_requests_side_by_side(model):
    async with engine_in_process(**fields(model)) as engine, raw_frontend(engine.address) as frontend:
        held = [
            await frontend.add([40 + i, 41], structured_output=regex("[a-z]{3}=[0-9]"), eos_token_ids=[2])
            for i in range(6)
        ]
        free = await frontend.add([50, 51], max_tokens=5)
        bad = await frontend.add([52], structured_output=regex("((("), eos_token_ids=[2])
        ends = await frontend.finish(*held, free, bad)
        for handle in held:
            assert re.fullmatch("[a-z]{3}=[0-9]", decode_bytes(frontend.tokens[handle]))
        assert {end.reason for end in ends[:6]} == {pb.FINISH_REASON_STOP}
        assert len(frontend.tokens[free]) == 5
        assert ends[-1].reason == pb.FINISH_REASON_ERROR
        assert ends[-1].error.code == 3
        assert ends[-1].error.field == "structured_output.regex"
        await engine.wait_idle()


async def test_an_abort_and_a_deadline_while_compiling(model):
    async with engine_in_process(**fields(model)) as engine, raw_frontend(engine.address) as frontend:
        # The first grammar has a process and a tokenizer to wait for, so these come before it is compiled.
        aborted = await frontend.add([40], structured_output=regex("a{7}"), eos_token_ids=[2])
        await frontend.abort(aborted)
        late = await frontend.add([41], structured_output=regex("a{8}"), eos_token_ids=[2], deadline_remaining_ms=1)
        (end,) = await frontend.finish(late)
        assert (end.reason, end.abort_cause) == (pb.FINISH_REASON_ABORT, pb.ABORT_CAUSE_DEADLINE)
        assert aborted not in frontend.tokens
        await engine.wait_idle()


async def test_a_resumed_request_is_checked_against_its_grammar(model):
    async with engine_in_process(**fields(model)) as engine, raw_frontend(engine.address) as frontend:
        good = await frontend.add(
            [40], structured_output=regex("abc"), eos_token_ids=[2], resume_token_ids=encode_bytes("ab")
        )
        bad = await frontend.add(
            [41], structured_output=regex("abc"), eos_token_ids=[2], resume_token_ids=encode_bytes("b")
        )
        ends = await frontend.finish(good, bad)
        assert decode_bytes(frontend.tokens[good]) == "c"
        assert ends[1].error.field == "resume_token_ids"


async def test_a_model_without_a_tokenizer_refuses(tmp_path):
    async with engine_in_process(model=str(tmp_path)) as engine, raw_frontend(engine.address) as frontend:
        handle = await frontend.add([40], structured_output=regex("a"), eos_token_ids=[2])
        (end,) = await frontend.finish(handle)
        assert end.error.code == 3
        assert "got a model without tokenizer.json" in end.error.message


@pytest.mark.parametrize("kind", [0, 7, 99])
async def test_unknown_kinds_are_refused(model, kind):
    async with engine_in_process(**fields(model)) as engine, raw_frontend(engine.address) as frontend:
        handle = await frontend.add([40], structured_output=pb.StructuredOutput(kind=kind, spec="a"))
        (end,) = await frontend.finish(handle)
        assert end.error.message == f"structured_output.kind must be one of [1, 2, 3, 4, 5, 6], got {kind}"


async def test_a_whole_process_takes_constraints_and_ends_in_order(model):
    engine = EngineSubprocess("--fake-vocab-size", str(VOCAB_SIZE), model=model)
    try:
        engine.wait_ready()
        async with raw_frontend(engine.address) as frontend:
            handle = await frontend.add([40], structured_output=regex("[ab]{4}"), eos_token_ids=[2])
            (end,) = await frontend.finish(handle)
        assert re.fullmatch("[ab]{4}", decode_bytes(frontend.tokens[handle]))
        assert end.reason == pb.FINISH_REASON_STOP
        children = psutil.Process(engine.process.pid).children()
        assert children
        engine.terminate()
        assert engine.wait() == 0
        assert not psutil.wait_procs(children, timeout=60)[1], "processes outlived the engine"
    finally:
        engine.close()
