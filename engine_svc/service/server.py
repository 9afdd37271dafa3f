"""The engine's gRPC server and its clock: health, heartbeats, the watch over the core, and the end.

Belongs to one event loop. It serves before the model is loaded, so that an occupied port is found at once and health
answers all the time; streams are refused until then.
"""

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine_svc.core_thread import CoreThread
from engine_svc.metrics import EngineMetrics
from engine_svc.service.hub import Hub, HubOptions
from engine_svc.service.servicer import EngineServicer
from shared.rpc.options import engine_server_options
from shared.rpc.raw import raw_handlers
from shared.rpc.server import RpcServer, start_server
from shared.types import EngineInfo
from takt.engine.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["EngineService"]
SUMMARY_INTERVAL_SECONDS = 10.0
# How long frontends get to take their last messages.
CLOSE_GRACE_SECONDS = 3.0
# How much longer than the limit of a step the core may be silent before the process ends itself.
WATCHDOG_MARGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where to serve, and how long the core may go without a sign of life.

    With `with_watchdog` a hang that holds the interpreter ends the process; it is one for the whole process.
    """

    host: str = "127.0.0.1"
    port: int = 0
    hub: HubOptions = field(default_factory=HubOptions)
    execute_timeout: float = 300.0
    with_watchdog: bool = False


class EngineServer:
    """Serves one engine."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.hub = Hub(options.hub)
        self._rpc: RpcServer | None = None
        self._core: CoreThread | None = None
        self._metrics: EngineMetrics | None = None
        self._clock: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds and serves. Raises StartupError when the address cannot be had."""
        self._rpc = await start_server(
            self._options.host,
            self._options.port,
            handlers=[raw_handlers(SERVICE, EngineServicer(self.hub))],
            services=[SERVICE.full_name],
            options=engine_server_options(),
        )

    @property
    def rpc(self) -> RpcServer:
        """The running server."""
        assert self._rpc is not None, "the server is not started"
        return self._rpc

    def set_ready(self, info: EngineInfo, core: CoreThread, metrics: EngineMetrics) -> None:
        """The engine is loaded: takes streams, and watches the core from now on."""
        self._core, self._metrics = core, metrics
        self.hub.set_ready(info, core, metrics)
        self.rpc.set_serving(SERVICE.full_name, serving=True)
        self._clock = asyncio.create_task(self._tick())

    # --- the clock ------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        interval = self._options.hub.heartbeat_interval
        due = time.monotonic()
        next_summary = due + SUMMARY_INTERVAL_SECONDS
        while True:
            lag = time.monotonic() - due
            self._guarded(partial(self.hub.beat, lag if lag > interval / 2 else 0.0))
            self._guarded(self._watch_core)
            if time.monotonic() >= next_summary and self._metrics is not None:
                self._guarded(self._metrics.log_summary)
                next_summary = time.monotonic() + SUMMARY_INTERVAL_SECONDS
            due = time.monotonic() + interval
            await asyncio.sleep(interval)

    def _guarded(self, action: Callable[[], None]) -> None:
        """One failed beat must not be the last."""
        try:
            action()
        except Exception:
            logger.exception("a periodic task failed")

    def _watch_core(self) -> None:
        """Ends a hang of the core: seen from here, or by the interpreter's own timer when this cannot run either."""
        limit = self._options.execute_timeout + WATCHDOG_MARGIN_SECONDS
        if self._options.with_watchdog:
            faulthandler.dump_traceback_later(limit, exit=True)
        assert self._core is not None
        busy = self._core.busy_seconds()
        if busy > limit:
            reason = f"the core did not go on for {busy:.0f} s"
            self.rpc.set_serving("", serving=False)
            self.die(reason)
            self._core.fail(reason)
            if self._options.with_watchdog:
                # The core may be past hearing it.
                asyncio.get_running_loop().call_later(CLOSE_GRACE_SECONDS, os._exit, 1)

    # --- the end --------------------------------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Takes no new requests; open streams go on."""
        self.rpc.set_serving(SERVICE.full_name, serving=False)
        self.hub.drain(seconds)

    def die(self, reason: str) -> None:
        """Tells every frontend that the engine failed."""
        self.rpc.set_serving(SERVICE.full_name, serving=False)
        self.hub.die(reason)

    async def close(self, grace: float = CLOSE_GRACE_SECONDS) -> None:
        """Ends streams after their last messages, then everything; frontends that do not read get `grace` seconds."""
        if self._clock is not None:
            self._clock.cancel()
        if self._options.with_watchdog:
            faulthandler.cancel_dump_traceback_later()
        self.hub.finish()
        if self._rpc is not None:
            await self._rpc.stop(grace)
