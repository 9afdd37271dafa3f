"""What buf's rules leave open in the protos, the checks of generated files, and the mapping of errors."""

import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from shared import errors
from shared.rpc.status import to_status
from takt.engine.v1 import engine_pb2
from takt.v1 import admin_pb2, inference_pb2, types_pb2
from takt_client.types import ChatOptions, GenerateOptions, SamplingOptions
from tests.contract.sources import ROOT

FILES = [types_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, engine_pb2.DESCRIPTOR]
BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(BUF is None, reason="buf is not installed")
def test_protos_are_clean():
    result = run(BUF, "lint", "protos")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", ["protos/generate.py", "docs/generate.py"])
def test_generated_files_are_up_to_date(script):
    result = run(sys.executable, script, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_method_has_its_own_request_and_response():
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"


def test_token_ids_that_a_client_sends_are_signed_so_that_bad_ones_are_refused_by_name():
    sampling = types_pb2.SamplingParams.DESCRIPTOR
    for field in sampling.fields:
        assert field.type not in (field.TYPE_UINT32, field.TYPE_UINT64, field.TYPE_INT32), field.name


def test_values_that_both_protos_speak_are_the_same():
    for enum in ("FinishReason",):
        public = types_pb2.DESCRIPTOR.enum_types_by_name[enum].values_by_name
        private = engine_pb2.DESCRIPTOR.enum_types_by_name[enum].values_by_name
        assert {n: v.number for n, v in public.items()} == {n: v.number for n, v in private.items()}


def test_every_error_is_mapped_to_a_status():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TaktError)]
    codes = {code.value[0]: code for code in grpc.StatusCode}
    used = {codes[to_status(kind("x")).code] for kind in kinds}
    # The rest of gRPC's codes say nothing that a caller could act upon.
    left_out = {"OK", "UNKNOWN", "OUT_OF_RANGE", "DATA_LOSS", "PERMISSION_DENIED"}
    assert {code.name for code in grpc.StatusCode} - {code.name for code in used} == left_out


def test_the_client_offers_every_option_of_the_protos():
    assert set(SamplingOptions.__annotations__) == set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    generate = set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {"text", "token_ids", "sampling"}
    assert set(GenerateOptions.__annotations__) - set(SamplingOptions.__annotations__) == generate | {"timeout"}
    chat = set(inference_pb2.ChatRequest.DESCRIPTOR.fields_by_name) - {"messages", "sampling"}
    assert set(ChatOptions.__annotations__) - set(SamplingOptions.__annotations__) == chat | {"timeout"}
