from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_CONNECTING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_SUSPECT: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_REFUSED: _ClassVar[EngineState]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_CONNECTING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_SUSPECT: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_REFUSED: EngineState

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("engines", "num_requests", "draining")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    num_requests: int
    draining: bool
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ..., num_requests: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("address", "state", "num_running", "num_waiting", "kv_cache_usage", "step_counter", "num_in_flight", "last_seen_seconds", "epoch", "max_model_len", "data_parallel_rank", "last_error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTER_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: EngineState
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    step_counter: int
    num_in_flight: int
    last_seen_seconds: float
    epoch: str
    max_model_len: int
    data_parallel_rank: int
    last_error: str
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., step_counter: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., last_seen_seconds: _Optional[float] = ..., epoch: _Optional[str] = ..., max_model_len: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("reset_running_requests", "timeout_ms")
    RESET_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    reset_running_requests: bool
    timeout_ms: int
    def __init__(self, reset_running_requests: _Optional[bool] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EngineResetResult]
    def __init__(self, results: _Optional[_Iterable[_Union[EngineResetResult, _Mapping]]] = ...) -> None: ...

class EngineResetResult(_message.Message):
    __slots__ = ("address", "success", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    success: bool
    error: str
    def __init__(self, address: _Optional[str] = ..., success: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EnginePingResult]
    def __init__(self, results: _Optional[_Iterable[_Union[EnginePingResult, _Mapping]]] = ...) -> None: ...

class EnginePingResult(_message.Message):
    __slots__ = ("address", "round_trip_seconds", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    round_trip_seconds: float
    error: str
    def __init__(self, address: _Optional[str] = ..., round_trip_seconds: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("name", "timeout_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout_ms: int
    def __init__(self, name: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EngineProfileResult]
    def __init__(self, results: _Optional[_Iterable[_Union[EngineProfileResult, _Mapping]]] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EngineProfileResult]
    def __init__(self, results: _Optional[_Iterable[_Union[EngineProfileResult, _Mapping]]] = ...) -> None: ...

class EngineProfileResult(_message.Message):
    __slots__ = ("address", "trace_path", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRACE_PATH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    trace_path: str
    error: str
    def __init__(self, address: _Optional[str] = ..., trace_path: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...
