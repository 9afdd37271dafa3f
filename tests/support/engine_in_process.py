"""An engine inside the test's process: real core, real gRPC, fake executor.

The core runs in a thread; the server shares the test's event loop, because gRPC serves one loop of a process only.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, fields

from engine_svc.config import EngineConfig
from engine_svc.core_thread import CoreThread, EngineDeadError
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions, fake_token
from engine_svc.metrics import EngineMetrics
from engine_svc.service.hub import HubOptions
from engine_svc.service.server import EngineServer, ServerOptions
from engine_svc.startup import Engine, assemble_engine


def fake_tokens(prompt: list[int], count: int, *, seed: int = 0, start: int = 0, vocab_size: int = 1000) -> list[int]:
    """What a fake engine answers, from output index `start` on, when nothing ends the output."""
    return [fake_token(prompt, seed, index, vocab_size) for index in range(start, start + count)]


@dataclass
class EngineInProcess:
    """A running engine. `executor` and `engine.core` are there to look at and to hold steps."""

    executor: FakeExecutor
    engine: Engine
    core: CoreThread
    server: EngineServer
    metrics: EngineMetrics
    thread: threading.Thread
    error: list[EngineDeadError] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.server.rpc.address

    @property
    def num_open_requests(self) -> int:
        """Requests that the core holds."""
        return len(self.engine.core._requests)

    @property
    def num_used_blocks(self) -> int:
        """KV cache blocks in use."""
        pool = self.engine.core.scheduler.kv.pool
        return round(pool.usage * (self.engine.info.num_blocks - 1))

    async def wait_for_step(self, step: int) -> None:
        """Waits until the executor has taken up a step; it may still be held."""
        await asyncio.to_thread(self.executor.wait_for_step, step)

    async def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Waits for a condition on the engine's state. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - the state belongs to another thread
                await asyncio.sleep(0.01)

    async def wait_idle(self, seconds: float = 20.0) -> None:
        """Waits until the core holds no request and no block, and finds itself consistent."""
        await self.wait_until(
            lambda: not (self.num_open_requests or self.num_used_blocks or self.core.busy_seconds()), seconds
        )
        self.engine.core.check_invariants()

    def drain(self, seconds: float) -> None:
        """What a SIGTERM does."""
        self.server.drain(seconds)
        self.core.shut_down(time.monotonic() + seconds)


@contextlib.asynccontextmanager
async def engine_in_process(
    *,
    executor: FakeExecutor | None = None,
    hub: HubOptions | None = None,
    port: int = 0,
    execute_timeout: float = 30.0,
    **options: object,
) -> AsyncIterator[EngineInProcess]:
    """A ready engine. `options` are fields of EngineConfig or of FakeExecutorOptions."""
    flags = {f.name for f in fields(EngineConfig)} - {"executor"}
    knobs = {f.name for f in fields(FakeExecutorOptions)}
    assert set(options) <= flags | knobs, set(options) - flags - knobs
    executor = executor or FakeExecutor(
        FakeExecutorOptions(**{name: value for name, value in options.items() if name in knobs})
    )
    given = {name: value for name, value in options.items() if name in flags}
    config = EngineConfig(**{"model": "fake", "executor": "fake", **given})
    engine = assemble_engine(config, executor)
    metrics = EngineMetrics(config.model, config.engine_index)
    metrics.set_cache_config(engine.cache_config)
    server = EngineServer(
        ServerOptions(port=port, hub=hub or HubOptions(heartbeat_interval=0.2), execute_timeout=execute_timeout)
    )
    await server.start()
    core = CoreThread(engine.core, engine.executor, server.hub, execute_timeout=execute_timeout)
    engine.grammars.register_listener(core.grammar_ready)
    errors: list[EngineDeadError] = []

    def run() -> None:
        try:
            core.run()
        except EngineDeadError as error:
            errors.append(error)
            server.hub._loop.call_soon_threadsafe(server.die, str(error))

    thread = threading.Thread(target=run, name="core", daemon=True)
    thread.start()
    server.set_ready(engine.info, core, metrics)
    try:
        yield EngineInProcess(executor, engine, core, server, metrics, thread, errors)
    finally:
        executor.release()
        core.shut_down(time.monotonic())
        await server.close(1.0)
        executor.shutdown()
        engine.grammars.shutdown()
        thread.join(20)
        assert not thread.is_alive(), "the core thread did not end"
