"""Log lines for people and for programs."""

import json
import logging
import re

import pytest

from shared.log import setup_logging


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_lines(root_logger, capsys):
    setup_logging("info")
    logging.getLogger("engine_svc.x").info("ready in %d s", 3)
    logging.getLogger("engine_svc.x").debug("hidden")
    logging.getLogger("a").warning("slow", extra={"request_id": "r-1"})
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    engine_svc\.x: ready in 3 s", first)
    assert second.endswith("WARNING a: slow request_id=r-1")


def test_json_lines_hold_tracebacks(root_logger, capsys):
    setup_logging("DEBUG", json=True)
    try:
        int("boom")
    except ValueError:
        logging.getLogger("b").exception("failed", extra={"request_id": "r-2"})
    entry = json.loads(capsys.readouterr().err)
    assert entry["level"] == "error"
    assert entry["logger"] == "b"
    assert entry["message"] == "failed"
    assert entry["request_id"] == "r-2"
    assert "ValueError: invalid literal" in entry["exception"]


def test_a_second_set_up_replaces_the_first(root_logger, capsys):
    setup_logging("info")
    setup_logging("info")
    logging.getLogger("c").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1
