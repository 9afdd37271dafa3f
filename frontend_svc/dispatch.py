"""Puts one output of a request into an engine, and into another when that one is lost before the first token.

Knows the engine table and the rules of sending on, no gRPC. Invariant: a request that an engine may have been computing
when it crashed is sent on once at most, so that none walks through the fleet and kills it.
"""

import logging
import time
from dataclasses import dataclass

from frontend_svc.active_request import ActiveRequest
from frontend_svc.defaults import ResolvedRequest
from frontend_svc.engine_run import EngineRun
from frontend_svc.metrics import EngineMetrics, FrontendMetrics
from frontend_svc.routing.engine_table import EngineTable
from shared.engine_client import EngineLoss
from shared.errors import InvalidRequestError, UnavailableError

logger = logging.getLogger(__name__)

MAX_CRASHES = 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines, and how often an output may try another one."""

    engines: EngineTable
    metrics: FrontendMetrics
    max_retries: int


class Dispatch:
    """Where one output has been, and where it goes."""

    def __init__(self, fleet: "Fleet", active: ActiveRequest, run: EngineRun, resolved: ResolvedRequest) -> None:
        self.address = ""
        self.rank = 0
        self._fleet = fleet
        self._active = active
        self._run = run
        self._resolved = resolved
        self._epoch = ""
        self._num_retries = 0
        self._num_crashes = 0
        # Engine processes that drain: they are asked once.
        self._draining: set[str] = set()

    @property
    def metrics(self) -> EngineMetrics:
        """Those of the engine that it was sent to last."""
        return self._fleet.metrics.of_engine(self.rank)

    def send(self, beside: "Dispatch | None" = None) -> None:
        """Picks an engine and sends the request, to where the output `beside` is if it may: they share their prompt.

        Raises UnavailableError or InvalidRequestError.
        """
        client = self._fleet.engines.pick(
            rank=self._resolved.request.data_parallel_rank,
            excluded_epochs=self._draining,
            preferred_epoch="" if beside is None else beside._epoch,  # noqa: SLF001 - another of this class
        )
        caller, now = self._active.call.caller, time.monotonic()
        request = self._resolved.for_engine(
            age_seconds=now - caller.arrival,
            deadline_seconds=None if caller.deadline is None else max(0.0, caller.deadline - now),
            traceparent=caller.traceparent,
        )
        self._run.send(client, request)
        self.address, self._epoch = client.address, client.epoch
        self.rank = client.info.data_parallel_rank if client.info is not None else 0

    def send_on(self, loss: EngineLoss) -> None:
        """Sends a request whose engine is gone to another. Raises UnavailableError when it must not or cannot go on."""
        self._run.left_engine()
        reason = f"engine {loss.address} was lost: {loss.reason}"
        if self._run.num_output_tokens:
            raise self._lost(reason)
        if loss.crashed:
            self._num_crashes += 1
        if loss.drained:
            self._draining.add(self._epoch)
        else:
            self._num_retries += 1
        if self._num_retries > self._fleet.max_retries or self._num_crashes > MAX_CRASHES:
            raise self._lost(f"{reason}; it was not the first")
        self._run.collector.begin_anew()
        try:
            self.send()
        except (UnavailableError, InvalidRequestError) as error:
            raise self._lost(f"{reason}; {error.message}") from None
        self._fleet.metrics.retried()
        logger.info("sent on to engine %s: %s", self.address, reason, extra={"request_id": self._active.request_id})

    def _lost(self, message: str) -> UnavailableError:
        metadata = {"tokens_emitted": str(self._active.num_output_tokens), "crashes": str(self._num_crashes)}
        return UnavailableError(message, reason="ENGINE_LOST", metadata=metadata)
