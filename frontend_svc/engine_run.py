"""One output of a request in an engine: sent, ended, aborted there, at most once each.

Belongs to the event loop. Invariant: once it has left its engine, for whatever reason, nothing more is sent there.
"""

from frontend_svc.collector import OutputCollector
from frontend_svc.metrics import FrontendMetrics
from shared.engine_client import EngineCoreClient
from shared.types import AbortCause, EngineRequest, FinishedRequest, FinishReason


class EngineRun:
    """Where an output is computed. `num_output_tokens` have been taken from the collector."""

    __slots__ = ("_client", "_handle", "_metrics", "collector", "num_output_tokens")

    def __init__(self, collector: OutputCollector, metrics: FrontendMetrics) -> None:
        self.collector = collector
        self.num_output_tokens = 0
        self._metrics = metrics
        self._client: EngineCoreClient | None = None
        self._handle = 0

    def send(self, client: EngineCoreClient, request: EngineRequest) -> None:
        """Sends the request to an engine; outputs arrive in the collector. Raises TaktError."""
        self._handle = client.add_request(request, self.collector)
        self._client = client

    def left_engine(self) -> None:
        """The engine has nothing of it any more."""
        self._client = None

    def ended_in_engine(self, finished: FinishedRequest) -> None:
        """An end has come. Counts the abort, unless it was ours and is counted."""
        if self._client is not None and finished.reason is FinishReason.ABORT:
            self._metrics.aborted(finished.abort_cause)
        self._client = None

    def abort_in_engine(self, cause: AbortCause) -> None:
        """Ends it in its engine, if it is in one."""
        client, self._client = self._client, None
        if client is not None:
            client.abort_request(self._handle, cause)
            self._metrics.aborted(cause)
