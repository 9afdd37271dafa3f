"""Puts one request into an engine, and into another when that one is lost before the first token.

Knows the engine table and the rules of sending on, no gRPC. Invariant: a request that an engine may have been computing
when it crashed is sent on once at most, so that none walks through the fleet and kills it.
"""

import logging
import time

from frontend_svc.active_request import ActiveRequest
from frontend_svc.defaults import ResolvedRequest
from frontend_svc.metrics import FrontendMetrics
from frontend_svc.routing.engine_table import EngineTable
from shared.engine_client import EngineLoss
from shared.errors import InvalidRequestError, UnavailableError

logger = logging.getLogger(__name__)

MAX_CRASHES = 1


class Dispatch:
    """Where one request has been, and where it goes."""

    def __init__(
        self, engines: EngineTable, active: ActiveRequest, resolved: ResolvedRequest, metrics: FrontendMetrics
    ) -> None:
        self.address = ""
        self.rank = 0
        self._engines = engines
        self._active = active
        self._resolved = resolved
        self._metrics = metrics
        self._epoch = ""
        self._num_retries = 0
        self._num_crashes = 0
        # Engine processes that drain: they are asked once.
        self._draining: set[str] = set()

    def send(self) -> None:
        """Picks an engine and sends the request. Raises UnavailableError or InvalidRequestError."""
        client = self._engines.pick(rank=self._resolved.request.data_parallel_rank, excluded_epochs=self._draining)
        caller, now = self._active.call.caller, time.monotonic()
        request = self._resolved.for_engine(
            age_seconds=now - caller.arrival,
            deadline_seconds=None if caller.deadline is None else max(0.0, caller.deadline - now),
            traceparent=caller.traceparent,
        )
        self._active.send(client, request)
        self.address, self._epoch = client.address, client.epoch
        self.rank = client.info.data_parallel_rank if client.info is not None else 0

    def send_on(self, loss: EngineLoss, max_retries: int) -> None:
        """Sends a request whose engine is gone to another. Raises UnavailableError when it must not or cannot go on."""
        self._active.left_engine()
        reason = f"engine {loss.address} was lost: {loss.reason}"
        if self._active.num_output_tokens:
            raise self._lost(reason)
        if loss.crashed:
            self._num_crashes += 1
        if loss.drained:
            self._draining.add(self._epoch)
        else:
            self._num_retries += 1
        if self._num_retries > max_retries or self._num_crashes > MAX_CRASHES:
            raise self._lost(f"{reason}; it was not the first")
        self._active.collector.begin_anew()
        try:
            self.send()
        except (UnavailableError, InvalidRequestError) as error:
            raise self._lost(f"{reason}; {error.message}") from None
        self._metrics.retried()
        logger.info("sent on to engine %s: %s", self.address, reason, extra={"request_id": self._active.request_id})

    def _lost(self, message: str) -> UnavailableError:
        metadata = {"tokens_emitted": str(self._active.num_output_tokens), "crashes": str(self._num_crashes)}
        return UnavailableError(message, reason="ENGINE_LOST", metadata=metadata)
