"""Logging set-up of a process: one line a record on standard error, for people or as JSON.

A record's `extra={"request_id": ...}` is shown in both forms. Prompts and outputs are never logged.
"""

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


def _utc(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002
        return _utc(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        text = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return f"{text} request_id={request_id}" if request_id else text


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def setup_logging(level: str, json: bool = False) -> None:
    """Sends the whole process's records of `level` (one of LEVELS, any case) and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Chatty libraries speak only when something is wrong.
    for name in ("asyncio", "urllib3", "httpx", "httpcore", "huggingface_hub", "filelock", "transformers"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
