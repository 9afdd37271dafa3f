"""Builds an engine: executor, sizes, KV cache, core.

The one place where what was asked, what the model allows and what memory gives are brought together; every choice that
differs from what was asked is logged. Whatever keeps an engine from starting is a StartupError of one line.
"""

import gc
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_svc.config import EngineConfig, parse_bytes
from engine_svc.core.engine_core import EngineCore
from engine_svc.core.interfaces import Executor, KVCacheConfig, KVCacheSpec
from engine_svc.core.scheduler import SchedulerConfig
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from engine_svc.grammar.backend import GrammarCompiler, GrammarOptions
from engine_svc.model.checkpoint import eos_token_ids, read_json, tokenizer_digest
from engine_svc.model.resolve import resolve_model
from engine_svc.step_recorder import StepRecorder
from shared.errors import StartupError
from shared.types import EngineInfo

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A built engine. `core` runs on `executor`, which is `recorder` seen as what it is."""

    core: EngineCore
    recorder: StepRecorder
    grammars: GrammarCompiler
    info: EngineInfo
    cache_config: dict[str, str]

    @property
    def executor(self) -> Executor:
        """What runs the model."""
        return self.recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSize:
    """Blocks, and the longest sequence that they allow."""

    num_blocks: int
    max_model_len: int


def check_model(config: EngineConfig) -> None:
    """Raises StartupError when the model is not there; takes no time and loads nothing."""
    if config.executor == "uniproc":
        resolve_model(config.model, config.revision)


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Loads the model and builds everything around it. Raises StartupError."""
    executor = _guarded(config.model, lambda: build_executor(config, progress))
    try:
        return assemble_engine(config, executor)
    except BaseException:
        executor.shutdown()
        raise


def _guarded(model: str, build: Callable[[], Executor]) -> Executor:
    """One line for whatever a broken model makes the libraries raise."""
    try:
        return build()
    except StartupError:
        raise
    except Exception as error:
        logger.debug("loading %s failed", model, exc_info=True)
        text = " ".join(str(error).split())[:300]
        raise StartupError(f"model {model} cannot be loaded: {type(error).__name__}: {text}") from error


def assemble_engine(config: EngineConfig, executor: Executor) -> Engine:
    """Builds everything around an executor that has its model. Raises StartupError."""
    info = executor.model_info
    specs = executor.get_kv_cache_specs()
    if any(spec.non_causal for spec in specs):
        logger.info("The model has non-causal attention: chunked prefill and prefix caching are off.")
    size = size_kv_cache(config, specs, executor)
    scheduler_config = scheduler_limits(config, specs, size.max_model_len, executor.max_concurrent_batches)
    kv_config = KVCacheConfig(
        block_size=config.block_size,
        num_blocks=size.num_blocks,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_model_len=size.max_model_len,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
    )
    executor.initialize_kv_cache(kv_config)
    recorder = StepRecorder(executor)
    grammars = build_grammars(config, executor)
    try:
        core = EngineCore(scheduler_config, kv_config, recorder, vocab_size=info.vocab_size, grammars=grammars)
    except ValueError as error:
        raise StartupError(str(error)) from None
    logger.info(
        "KV cache: %d blocks of %d tokens, %d bytes; max_model_len %d.",
        size.num_blocks,
        config.block_size,
        size.num_blocks * _bytes_per_block(config, specs),
        size.max_model_len,
    )
    return Engine(
        core=core,
        recorder=recorder,
        grammars=grammars,
        info=engine_info(config, executor, scheduler_config, kv_config),
        cache_config={
            "block_size": str(config.block_size),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(scheduler_config.enable_prefix_caching),
            "num_gpu_blocks": str(size.num_blocks),
            "prefix_caching_hash_algo": "sha256",
            "kv_cache_memory_bytes": str(size.num_blocks * _bytes_per_block(config, specs)),
        },
    )


def build_grammars(config: EngineConfig, executor: Executor) -> GrammarCompiler:
    """What compiles grammars for the model's tokenizer; it starts nothing before a request wants one."""

    def find_folder() -> Path:
        # The fake takes its model as a folder without asking whether it is one.
        path = Path(config.model) if config.executor == "fake" else resolve_model(config.model, config.revision)
        return path if path.is_dir() else path.parent

    info = executor.model_info
    return GrammarCompiler(
        GrammarOptions(
            find_folder=find_folder,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            compile_timeout=config.grammar_compile_timeout,
            cache_bytes=parse_bytes("--grammar-cache-bytes", config.grammar_cache_bytes),
        )
    )


def engine_info(
    config: EngineConfig, executor: Executor, scheduler: SchedulerConfig, kv_cache: KVCacheConfig
) -> EngineInfo:
    """What the engine says of itself, with an epoch of its own."""
    info = executor.model_info
    return EngineInfo(
        epoch=uuid.uuid4().hex,
        model=config.model,
        max_model_len=scheduler.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        tokenizer_digest=info.tokenizer_digest,
        block_size=kv_cache.block_size,
        num_blocks=kv_cache.num_blocks,
        dtype=info.dtype,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_stop_token_ids=scheduler.max_stop_token_ids,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_logprobs=scheduler.max_logprobs,
        numerics=info.numerics,
    )


def freeze_heap() -> None:
    """Takes everything that lives as long as the process out of the garbage collector's rounds."""
    gc.collect()
    gc.freeze()


# --- sizes ------------------------------------------------------------------------------------------------------------


def _bytes_per_block(config: EngineConfig, specs: tuple[KVCacheSpec, ...]) -> int:
    return config.block_size * sum(spec.bytes_per_token for spec in specs)


def size_kv_cache(config: EngineConfig, specs: tuple[KVCacheSpec, ...], executor: Executor) -> KVCacheSize:
    """Blocks from the flags or the memory, and max_model_len fitted to them unless it was given.

    Raises StartupError when one sequence does not fit.
    """
    model_limit = executor.model_info.max_model_len
    wanted = config.max_model_len
    if wanted is not None and wanted > model_limit:
        raise StartupError(f"--max-model-len must be at most the model's {model_limit}, got {wanted}")
    bytes_per_block = _bytes_per_block(config, specs)
    num_blocks, source = config.num_blocks, "--num-blocks"
    if num_blocks is None:
        memory = config.kv_cache_bytes
        source = "--kv-cache-memory"
        if memory is None:
            memory, source = executor.get_available_kv_cache_memory(), "the memory available"
        num_blocks = memory // bytes_per_block
        source = f"{source} of {memory} bytes"
    # The null block holds no request's tokens.
    room = (num_blocks - 1) * config.block_size
    needed = wanted or min(model_limit, 2 * config.block_size)
    if room < needed:
        raise StartupError(
            f"{source} holds {max(room, 0)} tokens of KV cache, one sequence of {needed} needs "
            f"{(-(-needed // config.block_size) + 1) * bytes_per_block} bytes "
            f"({-(-needed // config.block_size) + 1} blocks)"
        )
    if wanted is not None:
        return KVCacheSize(num_blocks=num_blocks, max_model_len=wanted)
    if room < model_limit:
        logger.warning("max_model_len is fitted to %s: %d, the model allows %d.", source, room, model_limit)
    return KVCacheSize(num_blocks=num_blocks, max_model_len=min(room, model_limit))


def scheduler_limits(
    config: EngineConfig, specs: tuple[KVCacheSpec, ...], max_model_len: int, max_concurrent_batches: int
) -> SchedulerConfig:
    """The scheduler's configuration, without contradictions. Raises StartupError for those that were asked for."""
    non_causal = any(spec.non_causal for spec in specs)
    max_num_batched_tokens = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise StartupError(
            f"--max-num-batched-tokens must be at least max_model_len {max_model_len} without chunked prefill, "
            f"got {max_num_batched_tokens}"
        )
    if non_causal and max_num_batched_tokens < max_model_len:
        logger.info("max_num_batched_tokens is raised to max_model_len %d.", max_model_len)
        max_num_batched_tokens = max_model_len
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    if max_num_seqs < config.max_num_seqs:
        logger.info("max_num_seqs is lowered to max_num_batched_tokens %d.", max_num_seqs)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill and not non_causal,
        enable_prefix_caching=config.enable_prefix_caching and not non_causal,
        max_concurrent_batches=max_concurrent_batches,
        max_logprobs=config.max_logprobs,
    )


# --- executors --------------------------------------------------------------------------------------------------------


def build_executor(config: EngineConfig, progress: Progress | None) -> Executor:
    """The executor that the configuration names."""
    return _build_fake(config) if config.executor == "fake" else _build_uniproc(config, progress)


def _build_fake(config: EngineConfig) -> Executor:
    """A fake of a model's folder takes its vocabulary, end tokens and tokenizer, so that a real frontend fits it."""
    folder = Path(config.model)
    defaults = FakeExecutorOptions()
    eos: tuple[int, ...] = (2,)
    vocab_size = defaults.vocab_size
    if (folder / "config.json").is_file():
        model = read_json(folder / "config.json")
        eos = eos_token_ids(folder, model) or eos
        vocab_size = model.get("vocab_size", vocab_size)
    memory = config.kv_cache_bytes or defaults.available_kv_cache_memory
    if config.num_blocks is not None:
        memory = config.num_blocks * _bytes_per_block(config, defaults.kv_cache_specs)
    return FakeExecutor(
        FakeExecutorOptions(
            vocab_size=config.fake_vocab_size or vocab_size,
            max_model_len=config.max_model_len or defaults.max_model_len,
            eos_token_ids=eos,
            tokenizer_digest=tokenizer_digest(folder),
            available_kv_cache_memory=memory,
            max_concurrent_batches=config.max_concurrent_batches,
            step_seconds=config.fake_step_ms / 1000,
            eos_every=config.fake_eos_every,
            fail_at_step=config.fake_fail_at_step,
            hang_at_step=config.fake_hang_at_step,
            verify=False,
            profile_dir=config.profile_dir,
        )
    )


def _build_uniproc(config: EngineConfig, progress: Progress | None) -> Executor:
    # torch is imported here, once the flags, the ports and the model's path are known to be right.
    from engine_svc.executor.uniproc import ExecutorOptions, UniprocExecutor  # noqa: PLC0415 - as said
    from engine_svc.model.load import LoadOptions, load_model  # noqa: PLC0415 - as said

    model = load_model(
        LoadOptions(
            model=config.model,
            revision=config.revision,
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            ops=config.ops,
            progress=progress,
        )
    )
    options = ExecutorOptions(
        max_concurrent_batches=config.max_concurrent_batches,
        profile_dir=config.profile_dir,
        gpu_memory_utilization=config.gpu_memory_utilization,
        logprobs_mode=config.logprobs_mode,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return UniprocExecutor(model, options)
