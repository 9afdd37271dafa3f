from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_FRONTEND: _ClassVar[Role]
    ROLE_PEER: _ClassVar[Role]

class StructuredOutputKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STRUCTURED_OUTPUT_KIND_UNSPECIFIED: _ClassVar[StructuredOutputKind]
    STRUCTURED_OUTPUT_KIND_JSON_SCHEMA: _ClassVar[StructuredOutputKind]
    STRUCTURED_OUTPUT_KIND_JSON_OBJECT: _ClassVar[StructuredOutputKind]
    STRUCTURED_OUTPUT_KIND_REGEX: _ClassVar[StructuredOutputKind]
    STRUCTURED_OUTPUT_KIND_CHOICE: _ClassVar[StructuredOutputKind]
    STRUCTURED_OUTPUT_KIND_GRAMMAR: _ClassVar[StructuredOutputKind]
    STRUCTURED_OUTPUT_KIND_STRUCTURAL_TAG: _ClassVar[StructuredOutputKind]

class AbortCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_CAUSE_UNSPECIFIED: _ClassVar[AbortCause]
    ABORT_CAUSE_CLIENT: _ClassVar[AbortCause]
    ABORT_CAUSE_DEADLINE: _ClassVar[AbortCause]
    ABORT_CAUSE_STOP_STRING: _ClassVar[AbortCause]
    ABORT_CAUSE_SHUTDOWN: _ClassVar[AbortCause]
    ABORT_CAUSE_SLOW_CONSUMER: _ClassVar[AbortCause]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_FRONTEND: Role
ROLE_PEER: Role
STRUCTURED_OUTPUT_KIND_UNSPECIFIED: StructuredOutputKind
STRUCTURED_OUTPUT_KIND_JSON_SCHEMA: StructuredOutputKind
STRUCTURED_OUTPUT_KIND_JSON_OBJECT: StructuredOutputKind
STRUCTURED_OUTPUT_KIND_REGEX: StructuredOutputKind
STRUCTURED_OUTPUT_KIND_CHOICE: StructuredOutputKind
STRUCTURED_OUTPUT_KIND_GRAMMAR: StructuredOutputKind
STRUCTURED_OUTPUT_KIND_STRUCTURAL_TAG: StructuredOutputKind
ABORT_CAUSE_UNSPECIFIED: AbortCause
ABORT_CAUSE_CLIENT: AbortCause
ABORT_CAUSE_DEADLINE: AbortCause
ABORT_CAUSE_STOP_STRING: AbortCause
ABORT_CAUSE_SHUTDOWN: AbortCause
ABORT_CAUSE_SLOW_CONSUMER: AbortCause
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_REPETITION: FinishReason

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "add_requests", "abort_requests", "utility_call", "start_dp_wave", "heartbeat", "acknowledge_outputs")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UTILITY_CALL_FIELD_NUMBER: _ClassVar[int]
    START_DP_WAVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    add_requests: AddRequests
    abort_requests: AbortRequests
    utility_call: UtilityCall
    start_dp_wave: StartDpWave
    heartbeat: Heartbeat
    acknowledge_outputs: AcknowledgeOutputs
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., add_requests: _Optional[_Union[AddRequests, _Mapping]] = ..., abort_requests: _Optional[_Union[AbortRequests, _Mapping]] = ..., utility_call: _Optional[_Union[UtilityCall, _Mapping]] = ..., start_dp_wave: _Optional[_Union[StartDpWave, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., acknowledge_outputs: _Optional[_Union[AcknowledgeOutputs, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("ready", "step_outputs", "utility_result", "heartbeat", "draining", "dead", "wave_complete", "start_wave")
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    UTILITY_RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    WAVE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    START_WAVE_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    step_outputs: StepOutputs
    utility_result: UtilityResult
    heartbeat: EngineHeartbeat
    draining: Draining
    dead: Dead
    wave_complete: WaveComplete
    start_wave: StartWave
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., step_outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., utility_result: _Optional[_Union[UtilityResult, _Mapping]] = ..., heartbeat: _Optional[_Union[EngineHeartbeat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., dead: _Optional[_Union[Dead, _Mapping]] = ..., wave_complete: _Optional[_Union[WaveComplete, _Mapping]] = ..., start_wave: _Optional[_Union[StartWave, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("role", "frontend_id", "protocol_version", "max_unacknowledged_outputs")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_UNACKNOWLEDGED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    frontend_id: str
    protocol_version: int
    max_unacknowledged_outputs: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., frontend_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., max_unacknowledged_outputs: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("epoch", "protocol_version", "model", "max_model_len", "vocab_size", "eos_token_ids", "tokenizer_digest", "block_size", "num_blocks", "dtype", "world_sizes", "data_parallel_rank", "limits", "numerics", "draining")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZES_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    protocol_version: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_digest: str
    block_size: int
    num_blocks: int
    dtype: str
    world_sizes: WorldSizes
    data_parallel_rank: int
    limits: Limits
    numerics: NumericsFingerprint
    draining: bool
    def __init__(self, epoch: _Optional[str] = ..., protocol_version: _Optional[int] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer_digest: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., dtype: _Optional[str] = ..., world_sizes: _Optional[_Union[WorldSizes, _Mapping]] = ..., data_parallel_rank: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., numerics: _Optional[_Union[NumericsFingerprint, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class WorldSizes(_message.Message):
    __slots__ = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    def __init__(self, tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., data_parallel: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_num_seqs", "max_num_batched_tokens", "max_stop_token_ids", "max_message_bytes", "max_logprobs")
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_stop_token_ids: int
    max_message_bytes: int
    max_logprobs: int
    def __init__(self, max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_logprobs: _Optional[int] = ...) -> None: ...

class NumericsFingerprint(_message.Message):
    __slots__ = ("weights_digest", "dtype", "op_set", "instruction_set", "batch_invariant")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OP_SET_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_SET_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    weights_digest: str
    dtype: str
    op_set: str
    instruction_set: str
    batch_invariant: bool
    def __init__(self, weights_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., op_set: _Optional[str] = ..., instruction_set: _Optional[str] = ..., batch_invariant: _Optional[bool] = ...) -> None: ...

class AddRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, requests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_token_ids", "resume_token_ids", "sampling", "pooling", "eos_token_ids", "priority", "cache_salt", "tenant", "traceparent", "deadline_remaining_ms", "age_ms", "data_parallel_rank", "wave")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    pooling: PoolingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    cache_salt: str
    tenant: str
    traceparent: str
    deadline_remaining_ms: int
    age_ms: int
    data_parallel_rank: int
    wave: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., traceparent: _Optional[str] = ..., deadline_remaining_ms: _Optional[int] = ..., age_ms: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., wave: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias_token_ids", "logit_bias_values", "bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs", "logprob_token_ids", "repetition_detection", "structured_output", "skip_reading_prefix_cache")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_DETECTION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_detection: RepetitionDetection
    structured_output: StructuredOutput
    skip_reading_prefix_cache: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias_token_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., repetition_detection: _Optional[_Union[RepetitionDetection, _Mapping]] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., skip_reading_prefix_cache: _Optional[bool] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RepetitionDetection(_message.Message):
    __slots__ = ("max_pattern_size", "min_pattern_size", "min_count")
    MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_pattern_size: int
    min_pattern_size: int
    min_count: int
    def __init__(self, max_pattern_size: _Optional[int] = ..., min_pattern_size: _Optional[int] = ..., min_count: _Optional[int] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("kind", "spec")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    kind: StructuredOutputKind
    spec: str
    def __init__(self, kind: _Optional[_Union[StructuredOutputKind, str]] = ..., spec: _Optional[str] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("pooling", "normalize")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    pooling: str
    normalize: bool
    def __init__(self, pooling: _Optional[str] = ..., normalize: _Optional[bool] = ...) -> None: ...

class AbortRequests(_message.Message):
    __slots__ = ("handles", "causes")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    causes: _containers.RepeatedScalarFieldContainer[AbortCause]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., causes: _Optional[_Iterable[_Union[AbortCause, str]]] = ...) -> None: ...

class UtilityCall(_message.Message):
    __slots__ = ("call_id", "timeout_ms", "reset_prefix_cache", "get_load", "ping", "start_profile", "stop_profile")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    GET_LOAD_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    START_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STOP_PROFILE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    timeout_ms: int
    reset_prefix_cache: ResetPrefixCacheMethod
    get_load: GetLoadMethod
    ping: PingMethod
    start_profile: StartProfileMethod
    stop_profile: StopProfileMethod
    def __init__(self, call_id: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCacheMethod, _Mapping]] = ..., get_load: _Optional[_Union[GetLoadMethod, _Mapping]] = ..., ping: _Optional[_Union[PingMethod, _Mapping]] = ..., start_profile: _Optional[_Union[StartProfileMethod, _Mapping]] = ..., stop_profile: _Optional[_Union[StopProfileMethod, _Mapping]] = ...) -> None: ...

class ResetPrefixCacheMethod(_message.Message):
    __slots__ = ("reset_running_requests",)
    RESET_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    reset_running_requests: bool
    def __init__(self, reset_running_requests: _Optional[bool] = ...) -> None: ...

class GetLoadMethod(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingMethod(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileMethod(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class StopProfileMethod(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UtilityResult(_message.Message):
    __slots__ = ("call_id", "error", "reset_prefix_cache", "load", "ping", "profile")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    error: EngineError
    reset_prefix_cache: ResetPrefixCacheResult
    load: EngineLoad
    ping: PingResult
    profile: ProfileResult
    def __init__(self, call_id: _Optional[int] = ..., error: _Optional[_Union[EngineError, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCacheResult, _Mapping]] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., ping: _Optional[_Union[PingResult, _Mapping]] = ..., profile: _Optional[_Union[ProfileResult, _Mapping]] = ...) -> None: ...

class ResetPrefixCacheResult(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: _Optional[bool] = ...) -> None: ...

class PingResult(_message.Message):
    __slots__ = ("step_counter",)
    STEP_COUNTER_FIELD_NUMBER: _ClassVar[int]
    step_counter: int
    def __init__(self, step_counter: _Optional[int] = ...) -> None: ...

class ProfileResult(_message.Message):
    __slots__ = ("trace_path",)
    TRACE_PATH_FIELD_NUMBER: _ClassVar[int]
    trace_path: str
    def __init__(self, trace_path: _Optional[str] = ...) -> None: ...

class EngineError(_message.Message):
    __slots__ = ("code", "reason", "message", "field")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    field: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("step", "handles", "num_tokens", "token_ids", "first_scheduled", "finished", "load", "logprobs", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_scheduled: _containers.RepeatedCompositeFieldContainer[FirstScheduled]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    load: EngineLoad
    logprobs: LogprobsTable
    prompt_logprobs: LogprobsTable
    def __init__(self, step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_scheduled: _Optional[_Iterable[_Union[FirstScheduled, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobsTable, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[LogprobsTable, _Mapping]] = ...) -> None: ...

class LogprobsTable(_message.Message):
    __slots__ = ("handles", "num_tokens", "widths", "token_ids", "logprobs", "ranks")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    widths: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., widths: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class FirstScheduled(_message.Message):
    __slots__ = ("handle", "num_cached_tokens", "queue_us")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_cached_tokens: int
    queue_us: int
    def __init__(self, handle: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "reason", "stop_token_id", "abort_cause", "error", "queue_us", "prefill_us", "decode_us", "num_preemptions", "num_cached_tokens", "embedding")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ABORT_CAUSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: FinishReason
    stop_token_id: int
    abort_cause: AbortCause
    error: EngineError
    queue_us: int
    prefill_us: int
    decode_us: int
    num_preemptions: int
    num_cached_tokens: int
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., abort_cause: _Optional[_Union[AbortCause, str]] = ..., error: _Optional[_Union[EngineError, _Mapping]] = ..., queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_cache_usage", "step_counter", "in_step_ms", "num_waiting_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTER_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    step_counter: int
    in_step_ms: int
    num_waiting_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., step_counter: _Optional[int] = ..., in_step_ms: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ...) -> None: ...

class AcknowledgeOutputs(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class EngineHeartbeat(_message.Message):
    __slots__ = ("sequence", "load")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    load: EngineLoad
    def __init__(self, sequence: _Optional[int] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("remaining_ms",)
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    remaining_ms: int
    def __init__(self, remaining_ms: _Optional[int] = ...) -> None: ...

class Dead(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StartDpWave(_message.Message):
    __slots__ = ("wave", "exclude_rank")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_RANK_FIELD_NUMBER: _ClassVar[int]
    wave: int
    exclude_rank: int
    def __init__(self, wave: _Optional[int] = ..., exclude_rank: _Optional[int] = ...) -> None: ...

class WaveComplete(_message.Message):
    __slots__ = ("wave",)
    WAVE_FIELD_NUMBER: _ClassVar[int]
    wave: int
    def __init__(self, wave: _Optional[int] = ...) -> None: ...

class StartWave(_message.Message):
    __slots__ = ("wave",)
    WAVE_FIELD_NUMBER: _ClassVar[int]
    wave: int
    def __init__(self, wave: _Optional[int] = ...) -> None: ...
