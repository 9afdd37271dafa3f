"""The frontend's life: what it is made of, when it is ready, how it ends.

It starts before its engines and outlives them: readiness follows the engines, liveness does not. A shutdown refuses
what is new, waits for what runs, then ends the rest with their last messages. Belongs to one event loop.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, fields

from frontend_svc.active_request import ActiveRequests, SlowClientLimits
from frontend_svc.api_keys import ApiKeys
from frontend_svc.chat import ChatParsers
from frontend_svc.config import FrontendConfig
from frontend_svc.defaults import Defaults
from frontend_svc.dispatch import Fleet
from frontend_svc.embedding import EmbeddingJourney
from frontend_svc.generation_config import GenerationDefaults
from frontend_svc.http.app import make_app
from frontend_svc.http.server import HttpServer, start_http
from frontend_svc.journey import Journey, JourneyOptions
from frontend_svc.metrics import FrontendMetrics
from frontend_svc.prompts import Prompts
from frontend_svc.routing.engine_client import ConnectionTimes
from frontend_svc.routing.engine_table import EngineTable, ServedTokenizer
from frontend_svc.service.admin_servicer import AdminServicer
from frontend_svc.service.servers import ADMIN_SERVICE, INFERENCE_SERVICE, start_admin, start_inference
from frontend_svc.service.servicer import InferenceServicer
from frontend_svc.services import Services
from frontend_svc.text.tokenizer import Tokenizer
from frontend_svc.validation import Caps
from shared.metrics import MetricsServer, start_metrics_server
from shared.rpc.server import RpcServer

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
SUMMARY_SECONDS = 10.0
# How long clients get to read the last messages of requests that a shutdown ended.
LAST_MESSAGES_SECONDS = 2.0
STOP_GRACE_SECONDS = 1
# What the operating system waits beyond the time of a slow client before it drops a connection.
SEND_MARGIN_SECONDS = 10.0


@dataclass(slots=True)
class _Servers:
    inference: RpcServer
    admin: RpcServer
    metrics: MetricsServer | None = None
    http: HttpServer | None = None


class Frontend:
    """A frontend in the event loop that made it."""

    def __init__(self, config: FrontendConfig, tokenizer: Tokenizer, times: ConnectionTimes | None = None) -> None:
        self.metrics = FrontendMetrics(config.model_names[0])
        slow_client = SlowClientLimits(config.slow_client_tokens, config.slow_client_timeout)
        self.requests = ActiveRequests(slow_client, self.metrics)
        self.engines = EngineTable(
            config.engine,
            frontend_id(),
            ServedTokenizer(digest=tokenizer.digest, vocab_size=tokenizer.vocab_size),
            on_change=self._engines_changed,
            times=times,
        )
        # None serves everybody.
        self.api_keys = None if config.api_key_file is None else ApiKeys.load(config.api_key_file)
        self._config = config
        self._prompts = Prompts(tokenizer, config.tokenize_timeout)
        self._services = self._make_services(tokenizer)
        self._servers: _Servers | None = None
        self._ticker: asyncio.Task[None] | None = None

    def _make_services(self, tokenizer: Tokenizer) -> Services:
        config = self._config
        caps = Caps(**{field.name: getattr(config, field.name) for field in fields(Caps)})
        options = JourneyOptions(
            model_names=config.model_names,
            caps=caps,
            parsers=ChatParsers.choose(
                config.tool_call_parser, config.reasoning_parser, tokenizer.chat_template_source
            ),
            stream_interval=config.stream_interval,
        )
        generation_config = tokenizer.generation_config if config.generation_config == "auto" else {}
        defaults = Defaults(tokenizer, GenerationDefaults.of(generation_config), config.max_bad_words)
        fleet = Fleet(self.engines, self.metrics, config.max_retries)
        return Services(
            tokenizer=tokenizer,
            prompts=self._prompts,
            engines=self.engines,
            requests=self.requests,
            journey=Journey(tokenizer, self._prompts, defaults, self.requests, fleet, options),
            embeddings=EmbeddingJourney(self._prompts, self.requests, fleet, config.model_names, caps),
            metrics=self.metrics,
            caps=caps,
            model_names=config.model_names,
            model_root=config.model or config.tokenizer_source,
            max_prompt_bytes=config.max_prompt_bytes,
        )

    # --- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serves. Raises StartupError when a port cannot be had."""
        config = self._config
        inference = await start_inference(config.host, config.port, InferenceServicer(self._services), self.api_keys)
        admin_servicer = AdminServicer(self._services, self.begin_drain)
        try:
            admin = await start_admin(config.admin_host, config.admin_port, admin_servicer)
        except BaseException:
            await inference.stop(0)
            raise
        self._servers = _Servers(inference, admin)
        try:
            if config.metrics_port >= 0:
                self._servers.metrics = start_metrics_server(config.host, config.metrics_port, self.metrics.registry)
            if config.http_port >= 0:
                self._servers.http = await self._start_http()
        except BaseException:
            await self.stop()
            raise
        admin.set_serving(ADMIN_SERVICE, serving=True)
        self.engines.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="ticker")

    async def _start_http(self) -> HttpServer:
        config = self._config
        app = make_app(
            self._services,
            max_body_bytes=config.http_max_body_bytes,
            max_prompts=config.max_completion_prompts,
            keys=self.api_keys,
        )
        # Requests end slow clients by themselves; this is for what is left of an answer when its request is gone.
        send_timeout = 2 * config.slow_client_timeout + SEND_MARGIN_SECONDS
        return await start_http(config.host, config.http_port, app, send_timeout=send_timeout, grace=STOP_GRACE_SECONDS)

    @property
    def address(self) -> str:
        """Where clients find it."""
        return self._running.inference.address

    @property
    def admin_address(self) -> str:
        """Where operators find it."""
        return self._running.admin.address

    @property
    def http_address(self) -> str | None:
        """Where HTTP clients find it."""
        return None if self._running.http is None else self._running.http.address

    @property
    def metrics_port(self) -> int | None:
        """The bound port of the metrics."""
        return None if self._running.metrics is None else self._running.metrics.port

    @property
    def _running(self) -> _Servers:
        if self._servers is None:
            raise RuntimeError("the frontend is not started")
        return self._servers

    def _engines_changed(self) -> None:
        self.metrics.update_engines(self.engines.clients)
        if self._servers is not None:
            serving = bool(self.engines.ready) and not self.requests.is_draining
            self._servers.inference.set_serving(INFERENCE_SERVICE, serving=serving)

    # --- every second -------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        due = time.monotonic() + TICK_SECONDS
        next_summary = time.monotonic() + SUMMARY_SECONDS
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            self.metrics.set_loop_lag(max(0.0, now - due))
            due = max(due, now) + TICK_SECONDS
            self.metrics.update_engines(self.engines.clients)
            self.requests.check_progress()
            if now >= next_summary:
                next_summary = now + SUMMARY_SECONDS
                self._log_summary()

    def _log_summary(self) -> None:
        prompt_tokens, generation_tokens = self.metrics.take_token_counts()
        busy = len(self.requests) or generation_tokens
        logger.log(
            logging.INFO if busy else logging.DEBUG,
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, In flight: %d reqs, "
            "Ready engines: %d of %d",
            prompt_tokens / SUMMARY_SECONDS,
            generation_tokens / SUMMARY_SECONDS,
            len(self.requests),
            len(self.engines.ready),
            len(self.engines.clients),
        )

    # --- end ----------------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuses new requests and reports NOT_SERVING; running requests go on."""
        self.requests.is_draining = True
        self._engines_changed()

    async def drain(self) -> None:
        """Waits for the running requests up to the configured time, then ends them with their last messages."""
        self.begin_drain()
        logger.info("draining: %d requests get %g s", len(self.requests), self._config.drain_timeout)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout):
                await self.requests.wait_idle()
        if len(self.requests):
            logger.warning("aborting %d requests", len(self.requests))
            self.requests.shut_down()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_MESSAGES_SECONDS):
                    await self.requests.wait_idle()

    async def stop(self) -> None:
        """Ends everything now."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.requests.is_draining = True
        if self._servers is not None:
            servers = self._servers
            stops = [servers.inference.stop(STOP_GRACE_SECONDS), servers.admin.stop(STOP_GRACE_SECONDS)]
            if servers.http is not None:
                stops.append(servers.http.stop())
            await asyncio.gather(*stops)
            if servers.metrics is not None:
                servers.metrics.close()
        await self.engines.close()
        self._prompts.close()


def frontend_id() -> str:
    """A name for this process that no other one has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
