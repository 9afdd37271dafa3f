"""Refuses what a request must not ask, naming the field, the limit and the value.

What depends on the engines (context, vocabulary) is checked against their smallest limits. The sampling's own options
have a module beside this one, and so have conversations. Knows no protobuf; never repeats a prompt.
"""

from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass

from frontend_svc.request import GenerationRequest
from frontend_svc.routing.engine_table import ServedLimits
from frontend_svc.text.chat_template import ChatMessage
from shared.errors import InvalidRequestError, NotFoundError, UnimplementedError

MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 1_024
MAX_ROLE_BYTES = 64
MAX_NAME_BYTES = 256
MAX_MESSAGES = 4_096
MAX_TOOL_CALLS = 1_024
# No tokenizer makes fewer tokens of ordinary text; longer text is refused before it is tokenized.
MAX_BYTES_PER_TOKEN = 16
# Far more than any context holds; to check more would keep other requests waiting.
MAX_DETOKENIZED_IDS = 1 << 20
# Values are shown up to this length.
MAX_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The operator's limits on a request."""

    max_prompt_bytes: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_n: int
    max_logit_bias: int
    max_bad_words: int
    max_prompt_logprobs: int
    max_structured_output_bytes: int
    max_structured_output_nesting: int
    max_tools: int
    max_embedding_inputs: int


def require(ok: bool, field: str, rule: str, value: object) -> None:
    """Raises InvalidRequestError: FIELD must be RULE, got VALUE."""
    if not ok:
        shown = str(value)
        shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
        raise InvalidRequestError(f"{field} must be {rule}, got {shown}", field=field)


def require_bytes(field: str, text: str, limit: int, minimum: int = 0) -> int:
    """The size of a text. Raises InvalidRequestError unless it is in [minimum, limit] bytes of UTF-8."""
    size = len(text.encode())
    rule = f"{minimum} to {limit} bytes" if minimum else f"at most {limit} bytes"
    require(minimum <= size <= limit, field, rule, f"{size} bytes")
    return size


def validate_request(request: GenerationRequest, caps: Caps, model_names: Collection[str]) -> None:
    """Checks all but the sampling that needs no engine.

    Raises InvalidRequestError, NotFoundError or UnimplementedError.
    """
    validate_model(request.model, model_names)
    validate_request_id(request.request_id)
    require_bytes("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES)
    if request.text is not None:
        validate_text("text", request.text, caps.max_prompt_bytes)
    elif request.messages is not None:
        validate_messages(request.messages, caps.max_prompt_bytes)
    elif request.token_ids is not None:
        require(len(request.token_ids) >= 1, "token_ids", "at least 1 token long", "0 tokens")
    else:
        raise InvalidRequestError("prompt must be set to text or token_ids, got none", field="prompt")
    if request.lora_name is not None:
        raise UnimplementedError("lora_name is not built yet: only its default is taken", field="lora_name")


def validate_model(model: str, model_names: Collection[str]) -> None:
    """An empty name means the model that is served. Raises NotFoundError."""
    if model and model not in model_names:
        raise NotFoundError(
            f"model must be one of {', '.join(model_names)}, got {model[:MAX_SHOWN]!r}",
            field="model",
            reason="MODEL_NOT_FOUND",
        )


def validate_request_id(request_id: str) -> None:
    """Request ids go to logs."""
    require_bytes("request_id", request_id, MAX_REQUEST_ID_BYTES)
    require(request_id.isprintable(), "request_id", "printable", ascii(request_id))


def validate_text(field: str, text: str, max_bytes: int) -> None:
    """A text that is to be tokenized."""
    require(text != "", field, "at least 1 byte long", "0 bytes")
    require_bytes(field, text, max_bytes)


def validate_messages(messages: Sequence[ChatMessage], max_bytes: int) -> None:
    """A conversation."""
    require(
        1 <= len(messages) <= MAX_MESSAGES, "messages", f"1 to {MAX_MESSAGES} messages", f"{len(messages)} messages"
    )
    total = sum(_validate_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    require(total <= max_bytes, "messages", f"at most {max_bytes} bytes", f"{total} bytes")


def _validate_message(field: str, message: ChatMessage) -> int:
    """The bytes of a message that is well formed."""
    require_bytes(f"{field}.role", message.role, MAX_ROLE_BYTES, minimum=1)
    require_bytes(f"{field}.name", message.name, MAX_NAME_BYTES)
    require_bytes(f"{field}.tool_call_id", message.tool_call_id, MAX_NAME_BYTES)
    if message.parts:
        require(not message.content, f"{field}.parts", "unset when content is set", f"{len(message.parts)} parts")
    count = len(message.tool_calls)
    require(count <= MAX_TOOL_CALLS, f"{field}.tool_calls", f"at most {MAX_TOOL_CALLS} calls", f"{count} calls")
    total = len(message.text.encode()) + len(message.reasoning.encode())
    for index, call in enumerate(message.tool_calls):
        require_bytes(f"{field}.tool_calls[{index}].name", call.name, MAX_NAME_BYTES, minimum=1)
        require_bytes(f"{field}.tool_calls[{index}].id", call.id, MAX_NAME_BYTES)
        total += len(call.arguments.encode())
    return total


def validate_against_engines(request: GenerationRequest, limits: ServedLimits) -> None:
    """Checks the prompt as far as can be told before tokenizing. Raises InvalidRequestError."""
    if request.token_ids is not None:
        validate_token_ids("token_ids", request.token_ids, limits.vocab_size)
    if request.sampling.truncate_prompt_tokens is not None:
        return
    if request.token_ids is not None:
        validate_prompt(request.token_ids, limits.max_model_len)
    elif request.text is not None:
        require_room("text", request.text, limits.max_model_len)
    for message in request.messages or ():
        require_room("messages", message.text, limits.max_model_len)


def require_room(field: str, text: str, max_model_len: int) -> None:
    """Refuses a text that no tokenizer would fit into the context."""
    most = MAX_BYTES_PER_TOKEN * max_model_len
    size = len(text.encode())
    require(size <= most, field, f"at most {most} bytes for max_model_len {max_model_len}", f"{size} bytes")


def validate_prompt(token_ids: Sequence[int], max_model_len: int, field: str = "prompt") -> None:
    """A prompt in tokens: something to continue, and room for one token more."""
    count = len(token_ids)
    require(count >= 1, field, "at least 1 token long", "0 tokens")
    require(count < max_model_len, field, f"shorter than max_model_len {max_model_len}", f"{count} tokens")


def validate_count(field: str, values: Sized, most: int) -> None:
    """A list that is not too long."""
    require(len(values) <= most, field, f"at most {most} ids", f"{len(values)} ids")


def validate_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Ids of tokens that exist."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        require(False, field, f"in [0, {vocab_size})", wrong)
