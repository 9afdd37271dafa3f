"""The engines of this frontend: which there are, which take requests, what all of them can take.

Decides whether an engine may serve at all, and asks the balancer among those that do. Knows no gRPC. Invariant: an
engine with another tokenizer never gets a request.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from frontend_svc.routing.balancer import Candidate, pick
from frontend_svc.routing.engine_client import AsyncEngineClient, ConnectionTimes, EngineState
from shared.errors import InvalidRequestError, UnavailableError
from shared.types import PROTOCOL_VERSION, EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTokenizer:
    """What an engine must agree with."""

    digest: str
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLimits:
    """What every ready engine can take."""

    max_model_len: int
    vocab_size: int
    max_stop_token_ids: int
    eos_token_ids: tuple[int, ...]
    # -1 is the whole vocabulary.
    max_logprobs: int = -1


def refusal(info: EngineInfo, tokenizer: ServedTokenizer) -> str:
    """Why an engine must not be used, or nothing. An engine without a tokenizer's digest serves no text of its own."""
    if info.protocol_version != PROTOCOL_VERSION:
        return f"refused: protocol version must be {PROTOCOL_VERSION}, the engine speaks {info.protocol_version}"
    if info.tokenizer_digest and info.tokenizer_digest != tokenizer.digest:
        return (
            f"refused: its tokenizer {info.tokenizer_digest[:12]} is not the one served here, {tokenizer.digest[:12]}"
        )
    if info.vocab_size < tokenizer.vocab_size:
        return f"refused: its vocabulary of {info.vocab_size} lacks tokens of the tokenizer's {tokenizer.vocab_size}"
    return ""


class EngineTable:
    """The configured engines in their order. All methods belong to the event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        frontend_id: str,
        tokenizer: ServedTokenizer,
        *,
        on_change: Callable[[], None],
        times: ConnectionTimes | None = None,
    ) -> None:
        """`on_change` is called when an engine's state may have changed."""
        self._next_start = 0
        self._limits: ServedLimits | None = None
        self._on_change = on_change
        self.clients = [
            AsyncEngineClient(
                address,
                frontend_id,
                check=lambda info: refusal(info, tokenizer),
                on_change=self._changed,
                times=times,
            )
            for address in addresses
        ]

    def start(self) -> None:
        """Begins to connect to all of them."""
        for client in self.clients:
            client.start()

    async def close(self) -> None:
        """Ends all connections."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def _changed(self) -> None:
        self._limits = None
        self._on_change()

    @property
    def ready(self) -> list[AsyncEngineClient]:
        """Engines that take requests."""
        return [client for client in self.clients if client.state is EngineState.READY]

    def limits(self) -> ServedLimits:
        """The smallest limits of the ready engines. Raises UnavailableError when none is ready."""
        if self._limits is None:
            infos = [client.info for client in self.ready if client.info is not None]
            if not infos:
                raise self._none_ready()
            self._limits = ServedLimits(
                max_model_len=min(info.max_model_len for info in infos),
                vocab_size=min(info.vocab_size for info in infos),
                max_stop_token_ids=min(info.max_stop_token_ids for info in infos),
                eos_token_ids=infos[0].eos_token_ids,
                max_logprobs=min((info.max_logprobs for info in infos if info.max_logprobs >= 0), default=-1),
            )
        return self._limits

    def pick(
        self, *, rank: int | None, excluded_epochs: Collection[str] = (), preferred_epoch: str = ""
    ) -> AsyncEngineClient:
        """An engine for a request: the preferred process if it may be, else the least busy one.

        Raises UnavailableError when none is ready, InvalidRequestError for a rank that no engine ever had.
        """
        candidates = [
            _candidate(index, client)
            for index, client in enumerate(self.clients)
            if client.state is EngineState.READY
            and client.epoch not in excluded_epochs
            and (rank is None or (client.info is not None and client.info.data_parallel_rank == rank))
        ]
        if not candidates:
            if rank is not None:
                self._check_rank(rank)
            raise self._none_ready()
        for candidate in candidates:
            if preferred_epoch and self.clients[candidate.index].epoch == preferred_epoch:
                return self.clients[candidate.index]
        index = pick(candidates, self._next_start)
        self._next_start = (index + 1) % len(self.clients)
        return self.clients[index]

    def _check_rank(self, rank: int) -> None:
        ranks = sorted({client.info.data_parallel_rank for client in self.clients if client.info is not None})
        if rank not in ranks:
            raise InvalidRequestError(
                f"data_parallel_rank must be one of {ranks}, got {rank}", field="data_parallel_rank"
            )

    def _none_ready(self) -> UnavailableError:
        states = ", ".join(f"{client.address} {client.state.name.lower()}" for client in self.clients)
        return UnavailableError(f"no engine is ready: {states}", reason="NO_ENGINE_READY")


def _candidate(index: int, client: AsyncEngineClient) -> Candidate:
    load = client.load
    return Candidate(
        index=index,
        num_in_flight=client.num_in_flight,
        num_in_flight_at_load=client.num_in_flight_at_load,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_cache_usage=load.kv_cache_usage,
    )
