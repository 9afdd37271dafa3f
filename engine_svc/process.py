"""The engine's process: its two threads, its signals, and its exit code.

The main thread builds the engine and then runs the core; the io thread serves. They are joined by queues only. Exit
code 0 is a shutdown that was asked for, 1 is anything else.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError

from engine_svc.config import EngineConfig
from engine_svc.core_thread import CoreThread, EngineDeadError
from engine_svc.metrics import EngineMetrics
from engine_svc.service.hub import HubOptions
from engine_svc.service.io_thread import IoThread
from engine_svc.service.server import CLOSE_GRACE_SECONDS, EngineServer, ServerOptions
from engine_svc.signals import ShutdownSignals
from engine_svc.startup import Engine, Progress, build_engine, check_model, freeze_heap
from shared.metrics import MetricsServer, start_metrics_server
from shared.rpc.server import join_address

logger = logging.getLogger(__name__)

# A thread that computes in Python gives way to the io thread this often; the default costs 5 ms a message.
SWITCH_INTERVAL_SECONDS = 0.0005
EXECUTOR_SHUTDOWN_SECONDS = 5.0


class EngineProcess:
    """An engine in its process. Made and used by the main thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._signals = ShutdownSignals()
        self._io = IoThread(self._io_failed)
        self._server: EngineServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._engine: Engine | None = None
        self._core: CoreThread | None = None

    def serve(self, progress: Progress | None) -> int:
        """Runs until a signal or a failure and returns the exit code. Raises StartupError."""
        faulthandler.enable()
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        self._signals.install()
        try:
            self._start(progress)
            return self._run()
        finally:
            self._close()

    # --- start ----------------------------------------------------------------------------------------------------

    def _start(self, progress: Progress | None) -> None:
        config = self._config
        check_model(config)
        metrics = EngineMetrics(config.model, config.engine_index)
        self._io.start()
        server = self._server = self._io.run(self._start_server())
        if config.metrics_port >= 0:
            self._metrics_server = start_metrics_server(config.host, config.metrics_port, metrics.registry)
        engine = self._engine = build_engine(config, progress)
        metrics.set_cache_config(engine.cache_config)
        core = self._core = CoreThread(engine.core, engine.executor, server.hub, execute_timeout=config.execute_timeout)
        engine.grammars.register_listener(core.grammar_ready)
        freeze_heap()
        self._io.run(self._set_ready(server, engine, core, metrics))
        self._signals.watch(self._io.loop, self._begin_shutdown)
        if self._metrics_server is not None:
            self._say(f"metrics: engine on {join_address(config.host, self._metrics_server.port)}")
        self._say(f"ready: engine on {server.rpc.address}")

    async def _start_server(self) -> EngineServer:
        config = self._config
        server = EngineServer(
            ServerOptions(
                host=config.host,
                port=config.port,
                hub=HubOptions(heartbeat_interval=config.heartbeat_interval),
                execute_timeout=config.execute_timeout,
                with_watchdog=True,
            )
        )
        await server.start()
        return server

    async def _set_ready(self, server: EngineServer, engine: Engine, core: CoreThread, metrics: EngineMetrics) -> None:
        server.set_ready(engine.info, core, metrics)

    def _say(self, line: str) -> None:
        """A line for scripts on standard output, and the same in the log."""
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        logger.info("%s", line)

    # --- run and end ----------------------------------------------------------------------------------------------

    def _run(self) -> int:
        assert self._core is not None
        assert self._server is not None
        try:
            self._core.run()
        except EngineDeadError as error:
            self._report_failure(error)
            self._io.call(self._server.die, str(error))
            return 1
        logger.info("The engine is shut down.")
        return 0

    def _begin_shutdown(self) -> None:
        """On the io thread, which is also the one that queues requests: none can come behind this."""
        assert self._core is not None
        assert self._server is not None
        seconds = self._config.drain_timeout
        load = self._core.load()
        logger.info(
            "Shutting down: %d running and %d waiting requests get %g s.", load.num_running, load.num_waiting, seconds
        )
        self._server.drain(seconds)
        self._core.shut_down(time.monotonic() + seconds)

    def _report_failure(self, error: EngineDeadError) -> None:
        assert self._engine is not None
        logger.critical("The engine failed: %s", error, exc_info=error.__cause__ or error)
        for line in self._engine.recorder.describe():
            logger.critical("In flight: %s", line)
        logger.critical("Load: %s", self._engine.core.load())

    def _io_failed(self, reason: str) -> None:
        if self._core is not None:
            self._core.fail(reason)

    def _close(self) -> None:
        if self._server is not None:
            try:
                self._io.run(self._server.close(), CLOSE_GRACE_SECONDS + 2)
            except FutureTimeoutError:
                logger.warning("The server did not end in time.")
        if self._metrics_server is not None:
            self._metrics_server.close()
        if self._engine is not None:
            # In threads, because a device or a library that hangs would keep this from ending.
            ending = [
                threading.Thread(target=end, name="shutdown", daemon=True)
                for end in (self._engine.executor.shutdown, self._engine.grammars.shutdown)
            ]
            for thread in ending:
                thread.start()
            deadline = time.monotonic() + EXECUTOR_SHUTDOWN_SECONDS
            for thread in ending:
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._server is not None:
            self._io.stop(1.0)


def leave(code: int) -> None:
    """Ends the process now, whatever its threads do: after a failure nothing may keep it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
