"""The errors of Takt. Every error that a caller can see is one of these.

    TaktError
    +-- InvalidRequestError      INVALID_ARGUMENT     a field is outside its limits
    +-- UnauthenticatedError     UNAUTHENTICATED      the caller has no key
    +-- NotFoundError            NOT_FOUND            an unknown model
    +-- DuplicateRequestError    ALREADY_EXISTS       the request id is in flight
    +-- OverloadedError          RESOURCE_EXHAUSTED   a queue, quota or size limit
    +-- UnavailableError         UNAVAILABLE          no engine is ready, or it was lost
    +-- DeadlineExceededError    DEADLINE_EXCEEDED    the deadline passed
    +-- CancelledError           CANCELLED            the client aborted
    +-- RequestAbortedError      ABORTED              an operator or a shutdown ended the request
    +-- PreconditionError        FAILED_PRECONDITION  the service is in no state for the call
    +-- UnimplementedError       UNIMPLEMENTED        a feature that is not built
    +-- InternalError            INTERNAL             a fault of ours
    StartupError                 (exit code 1)        a service cannot start

`shared.rpc.status` maps codes to gRPC. A message names the field, the limit and the given value, and never repeats
a prompt.
"""

from collections.abc import Mapping


class TaktError(Exception):
    """Base of the tree. `code` is google.rpc.Code; `reason` a short stable name; `field` the field at fault."""

    code = 13
    default_reason = "INTERNAL"

    def __init__(
        self, message: str, *, field: str = "", reason: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        """`metadata` travels in google.rpc.ErrorInfo."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})


class InvalidRequestError(TaktError):
    """A field is outside its limits."""

    code = 3
    default_reason = "INVALID_REQUEST"


class UnauthenticatedError(TaktError):
    """The caller did not say who it is, or not so that it is believed."""

    code = 16
    default_reason = "UNAUTHENTICATED"


class NotFoundError(TaktError):
    """Something that the request names does not exist."""

    code = 5
    default_reason = "NOT_FOUND"


class DuplicateRequestError(TaktError):
    """A request with this id is in flight."""

    code = 6
    default_reason = "DUPLICATE_REQUEST"


class OverloadedError(TaktError):
    """A queue, a quota or a size limit is reached."""

    code = 8
    default_reason = "OVERLOADED"


class UnavailableError(TaktError):
    """Nothing can serve the request now; a later try may succeed."""

    code = 14
    default_reason = "UNAVAILABLE"


class DeadlineExceededError(TaktError):
    """The request's deadline passed."""

    code = 4
    default_reason = "DEADLINE_EXCEEDED"


class CancelledError(TaktError):
    """The client aborted the request."""

    code = 1
    default_reason = "CANCELLED"


class RequestAbortedError(TaktError):
    """The service ended the request before it was done."""

    code = 10
    default_reason = "ABORTED"


class PreconditionError(TaktError):
    """The service is in no state for the call."""

    code = 9
    default_reason = "FAILED_PRECONDITION"


class UnimplementedError(TaktError):
    """The feature is not built."""

    code = 12
    default_reason = "UNIMPLEMENTED"


class InternalError(TaktError):
    """A fault of the service."""


class StartupError(Exception):
    """A service cannot start; its message is one line for the operator."""


def _subclasses(base: type[TaktError]) -> list[type[TaktError]]:
    return [base, *(found for child in base.__subclasses__() for found in _subclasses(child))]


def error_from_code(code: int, message: str, *, reason: str = "", field: str = "") -> TaktError:
    """Builds the error of a google.rpc.Code that came over the wire; unknown codes become InternalError."""
    by_code: dict[int, type[TaktError]] = {}
    for cls in _subclasses(TaktError)[1:]:
        # A service's own errors are below those of the tree, and come after them.
        by_code.setdefault(cls.code, cls)
    return by_code.get(code, InternalError)(message, reason=reason, field=field)
