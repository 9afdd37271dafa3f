"""Start before the engines, readiness that follows them, and shutdown."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import StartupError
from shared.types import AbortCause
from takt.v1 import admin_pb2, inference_pb2, types_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import SERVICE, collect, frontend_in_process, next_message
from tests.support.scripted_engine import ScriptedEngine, scripted_engine


async def test_it_serves_before_its_engines_and_is_ready_with_the_first(tokenizer_folder):
    engine = await ScriptedEngine().start()
    await engine.stop()
    async with frontend_in_process(tokenizer_folder, engine.address, "127.0.0.1:1") as frontend:
        assert await frontend.health("") == "SERVING"
        assert await frontend.health() == "NOT_SERVING"
        answer = await frontend.answer("a")
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert answer.info.reason == "NO_ENGINE_READY"
        (model,) = (await frontend.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.num_ready_engines) == ("tiny", 0, 0)
        # Text needs no engine.
        assert (await frontend.stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"))).token_ids
        await engine.start()
        try:
            await frontend.wait_ready()
            assert await frontend.health() == "SERVING"
            (model,) = (await frontend.stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert (model.max_model_len, model.num_ready_engines) == (256, 1)
        finally:
            await engine.stop()
        await frontend.until(lambda: not frontend.frontend.engines.ready)
        assert await frontend.health() == "NOT_SERVING"
        assert await frontend.health("") == "SERVING"


async def test_a_watcher_sees_engines_come_and_go(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        watch = health_pb2_grpc.HealthStub(frontend.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        statuses = []
        expected = [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING] * 2

        async def watching():
            async for response in watch:
                if response.status != (statuses[-1] if statuses else health_pb2.HealthCheckResponse.NOT_SERVING):
                    statuses.append(response.status)
                if statuses == expected:
                    return

        watcher = asyncio.create_task(watching())
        for _ in range(2):
            await frontend.until(lambda: statuses and statuses[-1] == health_pb2.HealthCheckResponse.SERVING)
            await engine.stop()
            await frontend.until(lambda: statuses[-1] == health_pb2.HealthCheckResponse.NOT_SERVING)
            if len(statuses) < 4:
                await engine.start()
        await asyncio.wait_for(watcher, 20)
        watch.cancel()


async def test_draining_refuses_the_new_and_finishes_the_old(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a")
        handle = (await stream.add()).handle
        drained = await frontend.admin.Drain(admin_pb2.DrainRequest())
        assert drained.num_requests == 1
        assert await frontend.health() == "NOT_SERVING"
        assert (await frontend.admin.GetLoad(admin_pb2.GetLoadRequest())).draining
        refused = await frontend.answer("a")
        assert refused.code == grpc.StatusCode.UNAVAILABLE
        assert refused.info.reason == "DRAINING"
        draining = asyncio.create_task(frontend.frontend.drain())
        await stream.finish(handle, [5])
        assert (await collect(call)).error is None
        await asyncio.wait_for(draining, 20)


async def test_what_does_not_end_in_time_gets_its_last_message(tokenizer_folder):
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address, drain_timeout=0.1) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        begun, waiting = frontend.generate("begun"), frontend.generate("a")
        handles = {len(request.prompt_token_ids): request.handle for request in [await stream.add() for _ in range(2)]}
        await stream.outputs({handles[5]: [70, 71]})
        await next_message(begun)
        await frontend.frontend.drain()
        answer = await collect(begun)
        assert answer.error is None
        assert answer.last.finish_reason == types_pb2.FINISH_REASON_ABORT
        assert answer.last.usage.completion_tokens == 2
        unbegun = await collect(waiting)
        assert unbegun.code == grpc.StatusCode.UNAVAILABLE
        assert not unbegun.messages
        aborts = dict([await stream.abort(), await stream.abort()])
        assert aborts == dict.fromkeys(handles.values(), int(AbortCause.SHUTDOWN))


async def test_an_occupied_port_is_one_clear_error(tokenizer_folder):
    async with frontend_in_process(tokenizer_folder, "127.0.0.1:1") as frontend:
        port = int(frontend.frontend.address.rpartition(":")[2])
        admin_port = int(frontend.frontend.admin_address.rpartition(":")[2])
        for options in ({"port": port}, {"admin_port": admin_port}):
            with pytest.raises(StartupError, match="in use"):
                async with frontend_in_process(tokenizer_folder, "127.0.0.1:1", **options):
                    pass


async def test_an_engine_that_restarts_is_found_again(tokenizer_folder):
    async with engine_in_process(vocab_size=300, max_model_len=256) as engine:
        port = engine.server.rpc.port
        async with frontend_in_process(tokenizer_folder, engine.address) as frontend:
            await frontend.wait_ready()
            epoch = frontend.frontend.engines.clients[0].epoch
            engine.drain(0.0)
            await engine.server.close(0.1)
            await frontend.until(lambda: not frontend.frontend.engines.ready)
            async with engine_in_process(vocab_size=300, max_model_len=256, port=port):
                await frontend.wait_ready()
                assert frontend.frontend.engines.clients[0].epoch != epoch
                answer = await frontend.answer("a", max_tokens=3, ignore_eos=True)
                assert answer.last.usage.completion_tokens == 3
