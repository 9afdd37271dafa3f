"""docs/request-options.md has a row for every field that a request can set, and for nothing else."""

import re

from takt.v1 import inference_pb2, types_pb2
from tests.contract.sources import ROOT

ROW = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)
# A row for each of their fields, in place of one for the whole.
NESTED = {"repetition_detection": types_pb2.RepetitionDetection}


def names(message, *, without=()):
    return {field.name for field in message.DESCRIPTOR.fields} - set(without)


def test_every_option_has_a_row():
    rows = ROW.findall((ROOT / "docs" / "request-options.md").read_text(encoding="utf-8"))
    assert len(rows) == len(set(rows))
    expected = names(types_pb2.SamplingParams, without=NESTED)
    for name, message in NESTED.items():
        expected |= {f"{name}.{field}" for field in names(message)}
    expected |= names(inference_pb2.GenerateRequest, without=["sampling"])
    expected |= names(inference_pb2.ChatRequest, without=["sampling"])
    expected |= {f"messages.{field}" for field in names(inference_pb2.ChatMessage)}
    expected |= names(types_pb2.StructuredOutput)
    expected |= names(inference_pb2.EmbedRequest)
    assert set(rows) == expected
