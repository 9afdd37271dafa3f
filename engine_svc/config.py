"""The engine's configuration: one frozen value, from which the flags are made.

Names are those that users of vLLM know. What depends on the model or on memory is left open here and resolved at
startup.
"""

import re
from dataclasses import dataclass

from shared.config import check_limits, option
from shared.errors import StartupError
from shared.log import LEVELS

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_bytes(flag: str, text: str) -> int:
    """Bytes of a text like 4GiB, 500M or 1073741824. Raises StartupError naming the flag."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise StartupError(f"{flag} must be a number of bytes like 4GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is told. Raises StartupError for a value outside its limits."""

    model: str = option(argument=True, help="Folder, GGUF file, embedded model or Hub name.")
    executor: str = option("uniproc", choices=("uniproc", "fake"), help="What runs the model; fake needs none.")
    dtype: str = option(
        "auto", choices=("auto", "float32", "bfloat16", "float16"), help="Type of weights and activations."
    )
    device: str = option("auto", choices=("auto", "cpu", "cuda"), help="Where the model runs.")
    ops: str = option(
        "auto", choices=("auto", "native", "reference"), help="Set of operations; auto is native where it can run."
    )
    revision: str | None = option(None, help="Branch, tag or commit of a Hub model.")
    max_model_len: int | None = option(
        None, minimum=2, help="Longest prompt and output together; fitted to model and memory when not given."
    )
    block_size: int = option(16, minimum=1, maximum=1024, help="Tokens a KV cache block.")
    num_blocks: int | None = option(None, minimum=2, help="KV cache blocks; from the memory when not given.")
    kv_cache_memory: str | None = option(
        None, help="Bytes for the KV cache, like 4GiB; what the device can give when not given."
    )
    gpu_memory_utilization: float = option(
        0.9, minimum=0.05, maximum=1, help="Share of a GPU's memory for weights, activations and KV cache."
    )
    max_num_seqs: int = option(256, minimum=1, help="Requests computed together.")
    max_num_batched_tokens: int = option(2048, minimum=1, help="Tokens computed in one step.")
    long_prefill_token_threshold: int = option(
        0, minimum=0, help="Prompt tokens of one request in a step; 0 is no limit."
    )
    scheduling_policy: str = option("fcfs", choices=("fcfs", "priority"), help="Order of waiting requests.")
    enable_chunked_prefill: bool = option(True, help="Compute prompts over several steps.")
    enable_prefix_caching: bool = option(True, help="Reuse the KV cache of equal prefixes.")
    max_concurrent_batches: int = option(1, minimum=1, maximum=16, help="Steps in flight at once.")
    max_logprobs: int = option(
        20, minimum=-1, help="Most likely tokens reported with a token at most; -1 is the whole vocabulary."
    )
    grammar_compile_timeout: float = option(
        10.0, minimum=0.1, help="Seconds that the grammar of a structured output may take to compile."
    )
    grammar_cache_bytes: str = option("64MiB", help="Bytes for compiled grammars that no request uses, like 64MiB.")
    logprobs_mode: str = option(
        "raw_logprobs",
        choices=("raw_logprobs", "processed_logprobs"),
        help="Report the model's own log-probabilities or those that tokens are sampled from.",
    )
    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int = option(50061, minimum=0, maximum=65535, help="Port of the engine's service; 0 takes a free one.")
    metrics_port: int = option(
        9101, minimum=-1, maximum=65535, help="Port of the metrics; 0 takes a free one, -1 serves none."
    )
    engine_index: int = option(0, minimum=0, help="Number of this engine, the label of its metrics.")
    drain_timeout: float = option(120.0, minimum=0, help="Seconds that requests get to end after a SIGTERM.")
    execute_timeout: float = option(300.0, minimum=0.1, help="Seconds that one step may take.")
    heartbeat_interval: float = option(1.0, minimum=0.05, maximum=5, help="Seconds between signs of life.")
    profile_dir: str | None = option(None, help="Folder for profiles; without one they are refused.")
    log_level: str = option("info", choices=LEVELS, help="Least level that is logged.")
    json_logs: bool = option(False, help="Log a JSON object a line.")
    fake_vocab_size: int | None = option(
        None, minimum=4, help="Vocabulary of the fake executor; that of the model's folder, or 1000, when not given."
    )
    fake_step_ms: float = option(0.0, minimum=0, help="Least milliseconds of a step of the fake executor.")
    fake_eos_every: int | None = option(None, minimum=1, help="Outputs of the fake executor end before this length.")
    fake_fail_at_step: int | None = option(None, minimum=0, help="Step of the fake executor that fails.")
    fake_hang_at_step: int | None = option(None, minimum=0, help="Step of the fake executor that never ends.")

    def __post_init__(self) -> None:
        check_limits(self)
        if self.kv_cache_memory is not None and self.kv_cache_bytes == 0:
            raise StartupError("--kv-cache-memory must be more than 0")
        parse_bytes("--grammar-cache-bytes", self.grammar_cache_bytes)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes for the KV cache, None when they are to be found out."""
        return None if self.kv_cache_memory is None else parse_bytes("--kv-cache-memory", self.kv_cache_memory)
