"""The frontend's configuration: one frozen value, from which the flags are made.

Names are those that users of vLLM know. What depends on the engines is not here: they tell it in Ready.
"""

from dataclasses import dataclass

from frontend_svc.text.reasoning import REASONING_PARSERS
from frontend_svc.text.tool_calls import TOOL_CALL_PARSERS
from shared.config import check_limits, option
from shared.errors import StartupError
from shared.log import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Everything that a frontend is told. Raises StartupError for a value outside its limits."""

    model: str | None = option(None, argument=True, help="Folder, GGUF file, embedded model or Hub name.")
    tokenizer: str | None = option(None, help="Where the tokenizer is, when not with the model.")
    revision: str | None = option(None, help="Branch, tag or commit of a Hub tokenizer.")
    served_model_name: tuple[str, ...] = option((), help="Name that requests may use; may be given several times.")
    chat_template: str | None = option(None, help="Chat template, or a file with one, in place of the model's own.")
    generation_config: str = option(
        "auto", choices=("auto", "vllm"), help="Defaults of the sampling: the model's own (auto), or none of it (vllm)."
    )
    tool_call_parser: str = option(
        "hermes", choices=TOOL_CALL_PARSERS, help="How the model writes calls of functions; none reads none."
    )
    reasoning_parser: str = option(
        "auto", choices=REASONING_PARSERS, help="How the model marks reasoning; auto looks at the chat template."
    )
    api_key_file: str | None = option(None, help="File of API keys, one a line; without it everybody is served.")
    engine: tuple[str, ...] = option((), help="HOST:PORT of an engine; may be given several times.")
    host: str = option("127.0.0.1", help="Address that clients reach.")
    port: int = option(50051, minimum=0, maximum=65535, help="Port that clients reach; 0 takes a free one.")
    admin_host: str = option("127.0.0.1", help="Address that operators reach.")
    admin_port: int = option(50052, minimum=0, maximum=65535, help="Port that operators reach; 0 takes a free one.")
    metrics_port: int = option(
        9100, minimum=-1, maximum=65535, help="Port of the metrics; 0 takes a free one, -1 serves none."
    )
    http_port: int = option(
        8000, minimum=-1, maximum=65535, help="Port of the OpenAI-compatible API; 0 takes a free one, -1 serves none."
    )
    http_max_body_bytes: int = option(16 * 1024 * 1024, minimum=1, help="Longest body of an HTTP request, in bytes.")
    max_prompt_bytes: int = option(4 * 1024 * 1024, minimum=1, help="Longest text of a prompt, in bytes.")
    max_stop_strings: int = option(16, minimum=0, help="Stop strings a request.")
    max_stop_string_bytes: int = option(256, minimum=1, help="Longest stop string, in bytes.")
    max_stop_token_ids: int = option(128, minimum=0, help="Stop token ids a request.")
    max_n: int = option(128, minimum=1, help="Outputs a request.")
    max_logit_bias: int = option(1024, minimum=0, help="Tokens with a logit bias a request.")
    max_bad_words: int = option(128, minimum=0, help="Bad words a request, after they are tokenized.")
    max_prompt_logprobs: int = option(2_000_000, minimum=0, help="Log-probabilities of a prompt: tokens times width.")
    max_structured_output_bytes: int = option(64 * 1024, minimum=1, help="Longest schema, regex or grammar, in bytes.")
    max_structured_output_nesting: int = option(64, minimum=1, help="Deepest nesting of a JSON schema.")
    max_tools: int = option(128, minimum=0, help="Functions that a conversation may call.")
    max_embedding_inputs: int = option(2048, minimum=1, help="Texts a call of Embed.")
    max_completion_prompts: int = option(128, minimum=1, help="Prompts of one HTTP completion.")
    stream_interval: int = option(1, minimum=1, help="Least tokens a message, behind an output's first one.")
    tokenize_timeout: float = option(30.0, minimum=0.1, help="Seconds that tokenizing a prompt may take.")
    max_retries: int = option(
        2, minimum=0, help="Further engines that a request without output is sent to when its engine is lost."
    )
    slow_client_tokens: int = option(4096, minimum=1, help="Tokens that may wait for a client that does not read.")
    slow_client_timeout: float = option(60.0, minimum=0.1, help="Seconds that a message may wait for its client.")
    drain_timeout: float = option(120.0, minimum=0, help="Seconds that requests get to end after a SIGTERM.")
    log_level: str = option("info", choices=LEVELS, help="Least level that is logged.")
    json_logs: bool = option(False, help="Log a JSON object a line.")

    def __post_init__(self) -> None:
        check_limits(self)
        if self.model is None and self.tokenizer is None:
            raise StartupError("MODEL or --tokenizer must be given")
        if not self.engine:
            raise StartupError("--engine must be given at least once")
        for address in self.engine:
            check_address("--engine", address)
        duplicates = {address for address in self.engine if self.engine.count(address) > 1}
        if duplicates:
            raise StartupError(f"--engine must name each engine once, got {duplicates.pop()} again")

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer is."""
        source = self.tokenizer or self.model
        assert source is not None
        return source

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served, the first one being what it is called in metrics."""
        return self.served_model_name or (self.model or self.tokenizer_source,)


def check_address(flag: str, address: str) -> None:
    """Raises StartupError unless an address is HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise StartupError(f"{flag} must be HOST:PORT, got {address!r}")
