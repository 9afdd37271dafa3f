"""Errors become statuses and come back as the same errors."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from shared import errors
from shared.rpc.status import error_from_rpc, is_stream_gone, to_status
from takt.v1 import inference_pb2, inference_pb2_grpc
from tests.support.echo import EchoServicer, echo_server, failure_of

ALL_ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TaktError)]


def details_of(status, kind):
    message = kind()
    return next((message for detail in status.details if detail.Unpack(message)), None)


def test_every_error_has_a_code_of_grpc_and_a_reason():
    codes = {code.value[0]: code for code in grpc.StatusCode}
    for error_class in ALL_ERRORS:
        status = to_status(error_class("what happened"))
        assert status.code in codes
        assert codes[status.code] not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
        info = details_of(status, error_details_pb2.ErrorInfo)
        assert info.reason == error_class.default_reason
        assert info.domain == "takt"


def test_errors_that_a_service_derives_are_never_made_of_a_code():
    class DerivedError(errors.UnavailableError):
        def __init__(self) -> None:
            super().__init__("of one room alone")

    assert type(errors.error_from_code(DerivedError.code, "gone", reason="X")) is errors.UnavailableError


def test_field_at_fault_is_a_violation():
    status = to_status(errors.InvalidRequestError("top_p must be in (0, 1], got 7", field="sampling.top_p"))
    violation = details_of(status, error_details_pb2.BadRequest).field_violations[0]
    assert violation.field == "sampling.top_p"
    assert details_of(to_status(errors.InternalError("x")), error_details_pb2.BadRequest) is None


@pytest.mark.parametrize("error_class", ALL_ERRORS)
def test_only_errors_that_may_pass_tell_when_to_retry(error_class):
    retry = details_of(to_status(error_class("x")), error_details_pb2.RetryInfo)
    assert (retry is not None) == (error_class in (errors.OverloadedError, errors.UnavailableError))


def test_long_texts_are_cut_between_characters():
    long = "ü€😀" * 5_000
    status = to_status(errors.InvalidRequestError(long, field=long, metadata={f"k{i}": long for i in range(50)}))
    assert len(status.message.encode()) <= 1_024
    assert status.message.endswith("...")
    assert status.ByteSize() <= 4_096


@pytest.mark.parametrize("error_class", [c for c in ALL_ERRORS if c is not errors.TaktError])
async def test_round_trip_over_the_wire(error_class):
    sent = error_class("what € happened", field="sampling.seed", reason="SPECIAL", metadata={"tokens_emitted": "7"})
    async with (
        echo_server(EchoServicer({"fail": sent})) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for call in (
            stub.Tokenize(inference_pb2.TokenizeRequest(text="fail")),
            stub.Generate(inference_pb2.GenerateRequest(text="fail")),
        ):
            got = error_from_rpc(await failure_of(call))
            assert type(got) is error_class
            assert (got.message, got.field, got.reason) == (sent.message, sent.field, sent.reason)
            assert got.metadata == sent.metadata


async def test_errors_of_grpc_itself_have_no_details():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        got = error_from_rpc(await failure_of(stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))))
    assert isinstance(got, errors.UnavailableError)
    assert got.message


def test_spellings_of_a_gone_stream():
    assert is_stream_gone(asyncio.InvalidStateError("RPC already finished."))
    assert is_stream_gone(EOFError())
    assert not is_stream_gone(ValueError("x"))
