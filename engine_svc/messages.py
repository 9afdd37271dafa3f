"""What other threads tell the core thread, and what a utility call answers.

Plain values that cross one queue; they know neither protobuf nor the core. None of them can be written by a client as
such: the service room builds each from a message that it has checked.
"""

from dataclasses import dataclass

from engine_svc.core.interfaces import Abort, CompiledGrammar
from shared.errors import TaktError
from shared.types import EngineLoad, EngineRequest


@dataclass(frozen=True, slots=True)
class AddRequests:
    """New requests of a client; `received` is the monotonic time at which they arrived."""

    client: int
    requests: tuple[EngineRequest, ...]
    received: float


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Ends requests, in the order of the queue: behind the adds that came before it."""

    aborts: tuple[Abort, ...]


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client's stream ended; all its requests end with it."""

    client: int


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A grammar is compiled, or cannot be."""

    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget cached prefixes; answers whether they were."""

    reset_running_requests: bool


@dataclass(frozen=True, slots=True)
class GetLoad:
    """Answers the EngineLoad."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Answers the number of steps so far."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Starts a profile; answers the empty string."""

    name: str


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Ends the profile; answers the path of its trace."""


UtilityMethod = ResetPrefixCache | GetLoad | Ping | StartProfile | StopProfile
UtilityOutcome = bool | int | str | EngineLoad | TaktError


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A call that runs between two steps, unless its deadline (monotonic seconds) passed before."""

    client: int
    call_id: int
    method: UtilityMethod
    deadline: float


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Something that the engine cannot do without is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Only ends a wait; the state to look at is set already."""


CoreMessage = AddRequests | AbortRequests | ClientGone | GrammarReady | UtilityCall | EngineFailed | WakeUp
