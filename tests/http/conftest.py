import contextlib
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.frontend_in_process import FrontendInProcess, frontend_in_process
from tests.support.http_client import HttpAnswer, HttpConnection, connection, request
from tests.support.scripted_engine import ScriptedStream, scripted_engine
from tests.support.tiny_tokenizer import write_tiny_tokenizer


@dataclass
class Edge:
    """A frontend with its HTTP port, and the engine behind it."""

    frontend: FrontendInProcess
    stream: ScriptedStream

    @property
    def address(self) -> str:
        return self.frontend.frontend.http_address

    async def request(self, path: str, body: Any = None, **options: Any) -> HttpAnswer:
        return await request(self.address, path, body, **options)

    def connection(self, **options: Any) -> contextlib.AbstractAsyncContextManager[HttpConnection]:
        return connection(self.address, **options)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_edge(tokenizer_folder):
    @contextlib.asynccontextmanager
    async def make(ready=None, **options):
        async with (
            scripted_engine(**(ready or {})) as engine,
            frontend_in_process(tokenizer_folder, engine.address, http_port=0, **options) as frontend,
        ):
            await frontend.wait_ready()
            yield Edge(frontend, await engine.stream())

    return make


@pytest.fixture
async def edge(make_edge):
    async with make_edge() as made:
        yield made
