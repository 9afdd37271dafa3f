"""The W3C trace context that a call may carry: passed on as it is, or not at all."""

import re

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(value: object) -> str:
    """The value when it is a traceparent, else nothing."""
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else ""
