"""One stack of two fake engines and a frontend for the tests that only talk to it."""

import pytest

from tests.support.byte_tokenizer import write_byte_model
from tests.support.stack import FAKE, serving


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="session")
def stack(byte_model):
    with serving(byte_model, *FAKE, "--engines", "2", "--served-model-name", "bytes") as running:
        yield running
