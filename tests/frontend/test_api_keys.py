"""API keys guard every method of the public port but health; the keys are nowhere to be seen."""

import grpc
import pytest

from frontend_svc.api_keys import ApiKeys
from shared.errors import StartupError, UnauthenticatedError
from takt.v1 import inference_pb2
from takt_client.aio import AsyncClient
from takt_client.errors import TaktClientError
from tests.support.frontend_in_process import collect, error_info, frontend_in_process
from tests.support.scripted_engine import scripted_engine

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
async def guarded(tokenizer_folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# operators\n  first-key  \n\nsecond-key\n")
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address, api_key_file=str(keys)) as frontend,
    ):
        await frontend.wait_ready()
        yield await engine.stream(), frontend


BAD = {
    "none": (),
    "empty": (("authorization", ""),),
    "no scheme": (("authorization", "first-key"),),
    "other scheme": (("authorization", "Basic first-key"),),
    "other key": (("authorization", "Bearer third-key"),),
    "part of a key": (("authorization", "Bearer first"),),
    "comment": (("authorization", "Bearer # operators"),),
    "no key": (("authorization", "Bearer "),),
}


@pytest.mark.parametrize("metadata", BAD.values(), ids=BAD)
async def test_callers_without_a_key_are_turned_away(guarded, metadata):
    stream, frontend = guarded
    for method in INFERENCE.methods:
        path = f"/{INFERENCE.full_name}/{method.name}"
        if method.server_streaming:
            answer = await collect(frontend.channel.unary_stream(path)(b"", metadata=metadata))
            error = answer.error
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await frontend.channel.unary_unary(path)(b"", metadata=metadata)
            error = failure.value
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
        assert error_info(error).reason == "UNAUTHENTICATED"
        assert "key" not in error.details().replace("API key", "")
    call = frontend.channel.stream_stream(REFLECTION)(metadata=metadata)
    assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
    assert stream.num_unread_adds == 0


async def test_health_needs_no_key(guarded):
    _, frontend = guarded
    assert await frontend.health("") == "SERVING"


@pytest.mark.parametrize("value", ["Bearer first-key", "bearer second-key"])
async def test_callers_with_a_key_are_served(guarded, value):
    stream, frontend = guarded
    metadata = (("authorization", value),)
    call = frontend.stub.Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata)
    await stream.finish((await stream.add()).handle, [9])
    assert (await collect(call)).error is None
    assert (await frontend.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)).models


async def test_the_client_sends_its_key(guarded):
    stream, frontend = guarded
    async with AsyncClient(frontend.frontend.address, api_key="second-key") as client:
        assert await client.list_models()
        answer = client.generate("a")
        await stream.finish((await stream.add()).handle, [9])
        assert (await answer.result()).finish_reason == "length"
    async with AsyncClient(frontend.frontend.address) as client:
        with pytest.raises(TaktClientError, match="authorization must be Bearer"):
            await client.list_models()


def test_files_of_keys(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n\n")
    with pytest.raises(StartupError, match="must hold at least one key"):
        ApiKeys.load(str(empty))
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        ApiKeys.load(str(tmp_path / "none"))
    keys = ApiKeys(["ключ"])
    keys.check("Bearer ключ")
    with pytest.raises(UnauthenticatedError):
        keys.check(None)
