"""Clients that do not read: deltas are merged, nothing grows, nobody else waits, and in the end the call is over."""

import asyncio

import grpc

from shared.types import AbortCause
from tests.support.frontend_in_process import collect, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine

# The client's side takes little in advance, so that a client that does not read is felt soon.
NARROW = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
# Far more messages than fit the window of 64 KiB.
MANY = 2_000


async def test_a_client_that_pauses_gets_merged_messages_and_every_token(tokenizer_folder):
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(
            tokenizer_folder, engine.address, channel_options=NARROW, slow_client_tokens=100_000
        ) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        slow, quick = frontend.generate("slow"), frontend.generate("quick")
        handles = {len(request.prompt_token_ids): request.handle for request in [await stream.add() for _ in range(2)]}
        slow_handle, quick_handle = handles[4], handles[5]
        quick_answer = asyncio.create_task(collect(quick))
        tokens = [10 + index % 200 for index in range(MANY)]
        for token in tokens:
            await stream.outputs({slow_handle: [token], quick_handle: [token]})
        await stream.finish(quick_handle, [7])
        # The other client has everything while this one has read nothing.
        assert (await quick_answer).token_ids == [*tokens, 7]
        assert not slow.done()
        await stream.finish(slow_handle, [8])
        answer = await collect(slow)
        assert answer.token_ids == [*tokens, 8]
        assert answer.last.usage.completion_tokens == MANY + 1
        assert len(answer.messages) < MANY / 2


async def test_a_client_with_too_much_unread_is_ended(tokenizer_folder):
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(
            tokenizer_folder, engine.address, channel_options=NARROW, slow_client_tokens=64
        ) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a")
        handle = (await stream.add()).handle
        sending = asyncio.create_task(_send_for_ever(stream, handle))
        assert await stream.abort() == (handle, AbortCause.SLOW_CONSUMER)
        sending.cancel()
        assert frontend.metric("takt_frontend_aborts_total", cause="slow_consumer") == 1
        answer = await collect(call)
        assert answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer.info.reason == "SLOW_CONSUMER"
        # What was delivered has no gap.
        assert answer.token_ids == [10 + index % 200 for index in range(len(answer.token_ids))]
        await frontend.idle()


async def test_a_client_that_never_reads_is_ended_in_time(tokenizer_folder):
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(
            tokenizer_folder, engine.address, channel_options=NARROW, slow_client_timeout=0.2
        ) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a")
        handle = (await stream.add()).handle
        for index in range(MANY):
            await stream.outputs({handle: [10 + index % 200]})
        assert await stream.abort() == (handle, AbortCause.SLOW_CONSUMER)
        # The request and its task are gone although the client still reads nothing.
        await frontend.idle()
        assert not call.done()
        answer = await collect(call)
        assert answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer.info.reason == "SLOW_CONSUMER"


async def test_a_client_that_leaves_without_ever_reading_is_noticed(tokenizer_folder):
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(tokenizer_folder, engine.address, channel_options=NARROW) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a")
        handle = (await stream.add()).handle
        for index in range(MANY):
            await stream.outputs({handle: [10 + index % 200]})
        call.cancel()
        assert await stream.abort() == (handle, AbortCause.CLIENT)
        await frontend.idle()


async def test_a_finished_request_does_not_wait_for_its_reader_for_ever(tokenizer_folder):
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(
            tokenizer_folder, engine.address, channel_options=NARROW, slow_client_timeout=0.2
        ) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a")
        handle = (await stream.add()).handle
        for index in range(MANY):
            await stream.outputs({handle: [10 + index % 200]})
        await stream.finish(handle, [7])
        await frontend.idle()
        assert (await collect(call)).code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK)


async def test_a_reader_of_one_message_at_a_time_is_no_slow_client(tokenizer_folder):
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address, slow_client_timeout=0.1) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a")
        handle = (await stream.add()).handle
        for token in range(10, 40):
            await stream.outputs({handle: [token]})
            assert list((await next_message(call)).token_ids) == [token]
        # Waiting for the engine is not the client's fault.
        frontend.frontend.requests.check_progress()
        await stream.finish(handle, [7])
        assert (await collect(call)).error is None


async def _send_for_ever(stream, handle):
    index = 0
    while True:
        await stream.outputs({handle: [10 + index % 200]})
        index += 1
