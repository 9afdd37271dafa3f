"""One output of a request on its way from an engine to its messages.

Nothing here waits: `advance` takes what has come and says what to tell. An output whose engine is lost before its
first token goes on in another engine unseen. Invariant: it ends once, by a message with a finish reason or by `error`.
"""

import time

from frontend_svc.chat import AnswerReader
from frontend_svc.collector import EngineLostError, Taken
from frontend_svc.dispatch import Dispatch
from frontend_svc.engine_run import EngineRun
from frontend_svc.output import OutputBuilder
from frontend_svc.output_shape import OutputShaper
from frontend_svc.request import RequestOutput
from shared.engine_client import EngineLoss
from shared.errors import DeadlineExceededError, InternalError, TaktError, error_from_code
from shared.types import AbortCause, FinishedRequest, FinishReason


class OutputFlow:
    """What becomes of one output. All methods belong to the event loop."""

    def __init__(
        self,
        run: EngineRun,
        dispatch: Dispatch,
        builder: OutputBuilder,
        reader: AnswerReader | None,
        shaper: OutputShaper | None,
    ) -> None:
        """`reader` and `shaper` are None where an output is told as it is built."""
        self.error: TaktError | None = None
        self.dispatch = dispatch
        self._run = run
        self._builder = builder
        self._reader = reader
        self._shaper = shaper

    def send(self, beside: "OutputFlow | None" = None) -> None:
        """Sends it to an engine, to that of another output if it may. Raises TaktError."""
        self.dispatch.send(None if beside is None else beside.dispatch)
        self._builder.count_for(self.dispatch.metrics)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._builder.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._builder.is_finished or self.error is not None

    @property
    def has_news(self) -> bool:
        """Whether `advance` has something to do."""
        return self._run.collector.has_news and not self.is_over

    def advance(self) -> RequestOutput | None:
        """Takes what has come; the message to tell, if any. Raises DeadlineExceededError."""
        run = self._run
        while self.has_news:
            try:
                taken = run.collector.take_now()
            except EngineLostError as error:
                loss = error.loss
            except TaktError as error:
                return self._fail(error)
            else:
                finished = taken.finished
                if finished is not None:
                    run.ended_in_engine(finished)
                is_new = not taken.token_ids and not run.num_output_tokens
                if finished is None or not is_new or not is_turned_away(finished):
                    return self._build(taken)
                loss = EngineLoss(self.dispatch.address, "it drains", crashed=False, drained=True)
            try:
                self.dispatch.send_on(loss)
            except TaktError as error:
                return self._fail(error)
        return None

    def _build(self, taken: Taken) -> RequestOutput | None:
        builder, run, now = self._builder, self._run, time.monotonic()
        builder.count_for(self.dispatch.metrics)
        finished = taken.finished
        error = None if finished is None else error_of(finished)
        if error is not None and not taken.token_ids:
            return self._fail(error)
        first = run.collector.first
        try:
            output = builder.add(taken, finished if error is None else None, first, now)
        except InternalError as fault:
            run.abort_in_engine(AbortCause.UNSPECIFIED)
            return self._fail(fault)
        run.num_output_tokens = builder.num_tokens
        if builder.stop_string is not None:
            run.abort_in_engine(AbortCause.STOP_STRING)
        if error is not None and not builder.is_finished:
            if isinstance(error, DeadlineExceededError):
                raise error
            self.error = error
            builder.close(output, FinishReason.ERROR, first, now)
        return self._tell(output)

    def _tell(self, output: RequestOutput) -> RequestOutput | None:
        if self._reader is not None:
            self._reader.read(output)
        return output if self._shaper is None else self._shaper.shape(output)

    def _fail(self, error: TaktError) -> RequestOutput | None:
        """Ends with an error: by a message if there was one before. Raises DeadlineExceededError."""
        if isinstance(error, DeadlineExceededError):
            raise error
        self.error = error
        return self.end_failed() if self._builder.num_tokens else None

    def end_failed(self) -> RequestOutput | None:
        """The last message of an output that failed, unless there was one."""
        if self.error is None or self._builder.is_finished:
            return None
        return self._tell(self._builder.end(FinishReason.ERROR, self._run.collector.first, time.monotonic()))

    def account_end(self) -> None:
        """Counts the end, however it came."""
        otherwise = FinishReason.ABORT if self.error is None else FinishReason.ERROR
        self._builder.account_end(otherwise, self._run.collector.first, time.monotonic())


def is_turned_away(finished: FinishedRequest) -> bool:
    """Whether an engine that goes ended a request that another one may take."""
    if finished.reason is FinishReason.ERROR:
        return finished.error is not None and finished.error.reason == "DRAINING"
    return finished.reason is FinishReason.ABORT and finished.abort_cause is AbortCause.SHUTDOWN


def error_of(finished: FinishedRequest) -> TaktError | None:
    """The error that an end means; None when the output simply ends."""
    if finished.reason is FinishReason.ABORT and finished.abort_cause is AbortCause.DEADLINE:
        return DeadlineExceededError("the request's deadline passed")
    if finished.reason is not FinishReason.ERROR:
        return None
    wire = finished.error
    if wire is None:
        return InternalError("the engine failed the request and told no reason")
    return error_from_code(wire.code, wire.message, reason=wire.reason, field=wire.field)
