"""Embed: one pooling request a text, vectors in the texts' order, all or none."""

import asyncio

import grpc
import pytest

from shared.types import AbortCause
from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import inference_pb2
from tests.support.frontend_in_process import frontend_in_process
from tests.support.scripted_engine import scripted_engine


@pytest.fixture
async def pair(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        await frontend.wait_ready()
        yield await engine.stream(), frontend


def embed(frontend, *texts, **fields):
    request = inference_pb2.EmbedRequest(texts=texts, **fields)
    return asyncio.create_task(_answer(frontend.stub.Embed(request)))


async def _answer(call):
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error


async def test_vectors_come_in_the_order_of_the_texts(pair):
    stream, frontend = pair
    answer = embed(frontend, "abc", "d", pooling="mean", normalize=True)
    requests = [await stream.add() for _ in range(2)]
    assert [(r.pooling.pooling, r.pooling.normalize) for r in requests] == [("mean", True)] * 2
    assert [r.WhichOneof("task") for r in requests] == ["pooling"] * 2
    assert list(requests[0].prompt_token_ids) == await frontend.answer_ids("abc")
    await stream.finish(requests[1].handle, reason=1, embedding=[3.0, 4.0])
    await stream.finish(requests[0].handle, reason=1, embedding=[1.0, 2.0], num_cached_tokens=2)
    response = await answer
    assert [list(entry.values) for entry in response.embeddings] == [[1.0, 2.0], [3.0, 4.0]]
    assert (response.usage.prompt_tokens, response.usage.cached_tokens) == (4, 2)
    assert response.usage.completion_tokens == 0
    await frontend.idle()


async def test_the_last_token_is_the_default(pair):
    stream, frontend = pair
    answer = embed(frontend, "a")
    request = await stream.add()
    assert (request.pooling.pooling, request.pooling.normalize) == ("last", False)
    await stream.finish(request.handle, reason=1, embedding=[1.0])
    assert len((await answer).embeddings) == 1


async def test_one_failure_ends_the_call_and_the_others(pair):
    stream, frontend = pair
    answer = embed(frontend, "a", "b", "c")
    requests = [await stream.add() for _ in range(3)]
    fault = pb.EngineError(code=13, reason="FAULT", message="a row went wrong")
    await stream.finish(requests[1].handle, reason=4, error=fault)
    error = await answer
    assert error.code() == grpc.StatusCode.INTERNAL
    assert {(await stream.abort())[0] for _ in range(2)} == {requests[0].handle, requests[2].handle}
    await frontend.idle()


async def test_a_caller_that_leaves_has_its_texts_aborted(pair):
    stream, frontend = pair
    call = frontend.stub.Embed(inference_pb2.EmbedRequest(texts=["a", "b"]))
    handles = {(await stream.add()).handle for _ in range(2)}
    call.cancel()
    assert {await stream.abort() for _ in range(2)} == {(handle, AbortCause.CLIENT) for handle in handles}
    await frontend.idle()


async def test_a_lost_engine_costs_nothing(tokenizer_folder):
    async with (
        scripted_engine() as one,
        scripted_engine(epoch="epoch-2") as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)
        streams = [await one.stream(), await two.stream()]
        answer = embed(frontend, "a")
        await frontend.until(lambda: any(stream.num_unread_adds for stream in streams))
        used, other = sorted(streams, key=lambda stream: -stream.num_unread_adds)
        used.end()
        await other.finish((await other.add()).handle, reason=1, embedding=[5.0])
        assert list((await answer).embeddings[0].values) == [5.0]


async def test_an_end_without_a_vector_is_a_fault(pair):
    stream, frontend = pair
    answer = embed(frontend, "a")
    await stream.finish((await stream.add()).handle, reason=1)
    error = await answer
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "told no vector" in error.details()
