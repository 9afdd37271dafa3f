import pytest

from tests.support.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))
