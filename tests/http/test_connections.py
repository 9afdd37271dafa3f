"""Clients that leave or do not read, and the end of the service."""

import asyncio

import pytest

from shared.types import AbortCause
from tests.support.frontend_in_process import frontend_in_process
from tests.support.http_client import request

PATH = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(edge, stream):
    async with edge.connection() as opened:
        await opened.send(PATH, {"prompt": "a", "stream": stream})
        add = await edge.stream.add()
    assert await edge.stream.abort() == (add.handle, AbortCause.CLIENT)
    await edge.frontend.idle()
    await edge.frontend.until(
        lambda: edge.frontend.metric("takt_frontend_requests_total", method=PATH, code="CANCELLED") == 1
    )


async def test_a_client_that_leaves_in_the_middle_of_a_stream(edge):
    async with edge.connection() as opened:
        await opened.send(PATH, {"prompt": ["a", "b"], "stream": True})
        adds = [await edge.stream.add(), await edge.stream.add()]
        await edge.stream.outputs({adds[0].handle: [70]})
        assert (await opened.head())[0] == 200
        assert b'"text":"d"' in await opened.chunk()
    aborted = {await edge.stream.abort(), await edge.stream.abort()}
    assert aborted == {(add.handle, AbortCause.CLIENT) for add in adds}
    await edge.frontend.idle()


async def test_a_connection_serves_one_request_after_another(edge):
    async with edge.connection() as opened:
        for stream in (False, True, False):
            await opened.send(PATH, {"prompt": "a", "stream": stream})
            add = await edge.stream.add()
            await edge.stream.finish(add.handle, [70])
            answer = await opened.answer()
            assert b'"text":"d"' in answer.body
        await opened.send("/v1/models")
        assert (await opened.answer()).status == 200


async def test_events_come_as_they_are_made(edge):
    async with edge.connection() as opened:
        await opened.send(PATH, {"prompt": "a", "stream": True})
        add = await edge.stream.add()
        for index in range(5):
            await edge.stream.outputs({add.handle: [70 + index]})
            if index == 0:
                assert (await opened.head())[0] == 200
            assert f'"text":"{chr(100 + index)}"'.encode() in await opened.chunk()
        await edge.stream.finish(add.handle)
        assert b'"finish_reason":"length"' in await opened.chunk()
        assert await opened.chunk() == b"data: [DONE]\n\n"


# Long enough for the buffers of both sockets.
MANY = 30_000


async def test_a_client_that_never_reads_is_cut(make_edge):
    async with (
        make_edge({"max_model_len": 1_000_000}, slow_client_timeout=0.3) as edge,
        edge.connection(limit=1_024) as opened,
    ):
        await opened.send(PATH, {"prompt": "a", "stream": True, "max_tokens": None})
        add = await edge.stream.add()
        sending = asyncio.create_task(flood(edge, add.handle))
        assert await edge.stream.abort() == (add.handle, AbortCause.SLOW_CONSUMER)
        sending.cancel()
        await edge.frontend.idle()
        assert b"[DONE]" not in await opened.gone()


async def test_a_client_with_too_much_unread_gets_an_error_behind_it(make_edge):
    async with (
        make_edge({"max_model_len": 1_000_000}, slow_client_tokens=64) as edge,
        edge.connection(limit=1_024) as opened,
    ):
        await opened.send(PATH, {"prompt": "a", "stream": True, "max_tokens": None})
        add = await edge.stream.add()
        sending = asyncio.create_task(flood(edge, add.handle))
        assert await edge.stream.abort() == (add.handle, AbortCause.SLOW_CONSUMER)
        sending.cancel()
        assert (await opened.head())[0] == 200
        body = b""
        while chunk := await opened.chunk():
            body += chunk
        *_, error, done, empty = body.split(b"\n\n")
        assert (done, empty) == (b"data: [DONE]", b"")
        assert b'"code":"slow_consumer"' in error
        await edge.frontend.idle()


async def flood(edge, handle):
    for index in range(MANY * 10):
        await edge.stream.outputs({handle: [70 + index % 20] * 1})


async def test_a_drain_ends_what_runs_and_refuses_what_is_new(make_edge):
    async with make_edge(drain_timeout=0.3) as edge, edge.connection() as opened:
        await opened.send(PATH, {"prompt": "a", "stream": True})
        add = await edge.stream.add()
        await edge.stream.outputs({add.handle: [70]})
        await opened.head()
        await opened.chunk()
        drain = asyncio.create_task(edge.frontend.frontend.drain())
        await edge.frontend.until(lambda: edge.frontend.frontend.requests.is_draining)
        for path, body in (("/health", None), (PATH, {"prompt": "a"})):
            answer = await edge.request(path, body)
            assert (answer.status, answer.error["code"]) == (503, "draining")
            assert answer.headers["retry-after"] == "1"
        assert (await edge.stream.abort())[0] == add.handle
        assert b'"finish_reason":"abort"' in await opened.chunk()
        assert await opened.chunk() == b"data: [DONE]\n\n"
        await drain


async def test_a_stop_ends_what_still_runs(make_edge):
    async with make_edge() as edge, edge.connection() as opened:
        await opened.send(PATH, {"prompt": "a"})
        await edge.stream.add()
        await edge.frontend.frontend.stop()
        answer = await opened.answer()
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert await opened.gone() == b""


async def test_without_engines(tokenizer_folder):
    async with frontend_in_process(tokenizer_folder, "127.0.0.1:1", http_port=0) as frontend:
        address = frontend.frontend.http_address
        answer = await request(address, "/health")
        assert (answer.status, answer.error["type"]) == (503, "server_error")
        answer = await request(address, PATH, {"prompt": "a"})
        assert answer.status == 503
        (model,) = (await request(address, "/v1/models")).json["data"]
        assert model["max_model_len"] is None


async def test_a_taken_port_is_said_in_one_line(edge, tokenizer_folder):
    from shared.errors import StartupError  # noqa: PLC0415

    port = int(edge.address.rpartition(":")[2])
    with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use"):
        async with frontend_in_process(tokenizer_folder, "127.0.0.1:1", http_port=port):
            pass
