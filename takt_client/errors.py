"""The one error that the client raises: a gRPC status with the details that Takt puts into it."""

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class TaktClientError(Exception):
    """A call failed.

    `code` is the name of the gRPC status, `reason` a short stable name of the cause, `field` the field at fault or
    empty, `retry_seconds` is set when a later try may succeed.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.reason = ""
        self.field = ""
        self.retry_seconds: float | None = None
        self.metadata: dict[str, str] = {}

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def error_from_rpc(error: grpc.RpcError) -> TaktClientError:
    """Reads the status of a failed call of the sync or the aio stack."""
    result = TaktClientError(error.code().name, error.details() or "")
    for detail in _details(error):
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            result.reason, result.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            result.field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            result.retry_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return result


def _details(error: grpc.RpcError) -> list[Any]:
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == _DETAILS_KEY:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
