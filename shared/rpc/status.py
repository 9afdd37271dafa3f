"""Our errors as gRPC status, both ways; the only place that knows the mapping.

A status carries google.rpc.ErrorInfo (reason, domain "takt"), BadRequest when a field is at fault, and RetryInfo when a
later try may succeed. Texts are cut so that the trailers stay far below the 8 KiB at which gRPC begins to drop them.
"""

import asyncio
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from shared.errors import OverloadedError, TaktError, UnavailableError, error_from_code

DOMAIN = "takt"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1_024
MAX_DETAIL_BYTES = 256
MAX_METADATA_ENTRIES = 8
RETRY_DELAY_SECONDS = 1
# The one overload that a later try does not help.
RESPONSE_TOO_LARGE = "RESPONSE_TOO_LARGE"

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _cut(text: str, limit: int) -> str:
    """The text, at most `limit` bytes of UTF-8."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - 3].decode("utf-8", "ignore") + "..."


def to_status(error: TaktError) -> status_pb2.Status:
    """The rich status of an error."""
    metadata = {
        _cut(key, 64): _cut(value, MAX_DETAIL_BYTES)
        for key, value in list(error.metadata.items())[:MAX_METADATA_ENTRIES]
    }
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=error.code, message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_DETAIL_BYTES), description=_cut(error.message, MAX_DETAIL_BYTES)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError | UnavailableError) and error.reason != RESPONSE_TOO_LARGE:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = RETRY_DELAY_SECONDS
        status.details.add().Pack(retry)
    return status


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TaktError) -> NoReturn:
    """Ends a call with the status of an error, by raising what gRPC raises for it."""
    status = to_status(error)
    await context.abort(
        _CODES[status.code], status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort returned")


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def error_from_rpc(error: grpc.RpcError) -> TaktError:
    """The error behind a failed call of the sync or the aio stack. UNKNOWN, which we never send, becomes INTERNAL."""
    code = error.code()
    reason, field, metadata = "", "", {}
    status = _rich_status(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
    message = error.details() or code.name
    result = error_from_code(code.value[0], message, reason=reason, field=field)
    result.metadata = metadata
    return result


def is_stream_gone(error: BaseException) -> bool:
    """Whether an error of reading or writing only says that the call is over; all such spellings mean the same."""
    return isinstance(error, grpc.aio.InternalError | grpc.aio.AioRpcError | asyncio.InvalidStateError | EOFError)
