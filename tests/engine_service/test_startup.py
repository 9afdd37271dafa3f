"""Configuration and sizes, by their effects."""

import logging

import pytest

from engine_svc.config import EngineConfig, parse_bytes
from engine_svc.core.interfaces import KVCacheSpec
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from engine_svc.startup import assemble_engine, build_engine, scheduler_limits, size_kv_cache
from engine_svc.step_recorder import describe_step
from shared.errors import StartupError
from tests.support.drive import make_request
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.raw_frontend import raw_frontend

CAUSAL = KVCacheSpec(num_layers=1, bytes_per_token=64)
NON_CAUSAL = KVCacheSpec(num_layers=1, bytes_per_token=64, non_causal=True)


def config(**values):
    return EngineConfig(model="fake", executor="fake", **values)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1024", 1024), ("4GiB", 4 << 30), ("4 gib", 4 << 30), ("1.5k", 1500), ("2MB", 2_000_000), ("3Ti", 3 << 40)],
)
def test_bytes(text, value):
    assert parse_bytes("--x", text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 GiB 5", "1e9", "4XB"])
def test_bytes_that_are_none(text):
    with pytest.raises(StartupError, match="--x must be a number of bytes"):
        parse_bytes("--x", text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"port": 70000}, "--port must be at most 65535, got 70000"),
        ({"block_size": 0}, "--block-size must be at least 1, got 0"),
        ({"dtype": "int8"}, "--dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority"),
        ({"kv_cache_memory": "0"}, "--kv-cache-memory must be more than 0"),
    ],
)
def test_a_value_outside_its_limits(values, text):
    with pytest.raises(StartupError) as error:
        config(**values)
    assert text in str(error.value)


def sized(fake=None, **values):
    executor = FakeExecutor(FakeExecutorOptions(synchronous=True, **(fake or {})))
    return size_kv_cache(config(**values), executor.get_kv_cache_specs(), executor)


def test_blocks_from_flags_and_memory():
    assert sized(num_blocks=50).num_blocks == 50
    assert sized(kv_cache_memory="1MiB").num_blocks == (1 << 20) // (16 * 64)
    assert sized(kv_cache_memory="1MiB", block_size=32).num_blocks == (1 << 20) // (32 * 64)
    assert sized(num_blocks=50, kv_cache_memory="1MiB").num_blocks == 50
    assert sized({"available_kv_cache_memory": 1 << 19}).num_blocks == (1 << 19) // (16 * 64)
    specs = (CAUSAL, KVCacheSpec(num_layers=2, bytes_per_token=128))
    assert sized({"kv_cache_specs": specs}, kv_cache_memory="3MiB").num_blocks == (3 << 20) // (16 * 192)


def test_max_model_len_is_fitted_and_said_so(caplog):
    assert sized({"max_model_len": 4096}).max_model_len == 4096
    assert not caplog.records
    assert sized({"max_model_len": 4096}, num_blocks=11).max_model_len == 160
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "max_model_len is fitted to --num-blocks: 160, the model allows 4096."
    assert sized({"max_model_len": 4096}, num_blocks=11, max_model_len=100).max_model_len == 100


def test_max_model_len_beyond_the_model():
    with pytest.raises(StartupError, match="--max-model-len must be at most the model's 2048, got 3000"):
        sized(max_model_len=3000)


def test_one_sequence_must_fit():
    assert sized(num_blocks=11, max_model_len=160).num_blocks == 11
    with pytest.raises(StartupError, match="holds 160 tokens of KV cache, one sequence of 161 needs 12288 bytes"):
        sized(num_blocks=11, max_model_len=161)


def test_non_causal_attention_switches_chunking_and_caching_off():
    limits = scheduler_limits(config(max_num_batched_tokens=64), (CAUSAL, NON_CAUSAL), 512, 1)
    assert not limits.enable_chunked_prefill
    assert not limits.enable_prefix_caching
    assert limits.max_num_batched_tokens == 512
    limits = scheduler_limits(config(max_num_batched_tokens=64), (CAUSAL,), 512, 1)
    assert limits.enable_chunked_prefill
    assert limits.enable_prefix_caching
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (64, 64)


async def test_non_causal_attention_in_effect():
    specs = (NON_CAUSAL,)
    async with (
        engine_in_process(kv_cache_specs=specs, max_model_len=400, max_num_batched_tokens=64) as engine,
        raw_frontend(engine.address) as frontend,
    ):
        prompt = list(range(40, 340))
        for _ in range(2):
            handle = await frontend.add(prompt, max_tokens=3)
            (finished,) = await frontend.finish(handle)
            assert finished.num_cached_tokens == 0
            assert frontend.tokens[handle] == fake_tokens(prompt, 3)
        # One step for a prompt, one for each further token.
        assert await frontend.ping() == 6


async def test_chunked_prefill_in_effect():
    async with engine_in_process(max_num_batched_tokens=64) as engine, raw_frontend(engine.address) as frontend:
        prompt = list(range(40, 340))
        handle = await frontend.add(prompt, max_tokens=1)
        await frontend.finish(handle)
        assert frontend.tokens[handle] == fake_tokens(prompt, 1)
        assert await frontend.ping() == 5


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3]), ("priority", [1, 3, 2])])
async def test_scheduling_policy_in_effect(policy, order):
    async with (
        engine_in_process(max_num_seqs=1, scheduling_policy=policy) as engine,
        raw_frontend(engine.address) as frontend,
    ):
        engine.executor.hold()
        for handle, priority in ((1, 0), (2, 5), (3, 1)):
            await frontend.add([handle], handle=handle, priority=priority, max_tokens=2)
            if handle == 1:
                await engine.wait_for_step(1)
        # Answered by the stream itself: the adds were read before.
        await frontend.utility(1)
        engine.executor.release()
        await frontend.finish(1, 2, 3)
        assert list(frontend.finished) == order


def test_a_broken_model_is_one_line(monkeypatch):
    def broken(*_):
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr("engine_svc.startup.build_executor", broken)
    with pytest.raises(StartupError, match="model fake cannot be loaded: ValueError: first line second line"):
        build_engine(config())


def test_a_fake_of_a_model_folder_fits_its_frontend(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8], "vocab_size": 50}')
    (tmp_path / "tokenizer.json").write_text("{}")
    engine = build_engine(EngineConfig(model=str(tmp_path), executor="fake"))
    engine.executor.shutdown()
    assert engine.info.eos_token_ids == (7, 8)
    assert engine.info.vocab_size == 50
    assert len(engine.info.tokenizer_digest) == 64
    assert engine.info.model == str(tmp_path)


def test_epochs_differ():
    engines = [assemble_engine(config(), FakeExecutor(FakeExecutorOptions(synchronous=True))) for _ in range(2)]
    assert engines[0].info.epoch != engines[1].info.epoch


def test_a_step_is_described_without_tokens():
    executor = FakeExecutor(FakeExecutorOptions(synchronous=True))
    engine = assemble_engine(config(), executor)
    engine.core.add_request(1, make_request(5, [123, 456, 789]), 0.0)
    steps = []
    execute = engine.recorder._executor.execute_model
    engine.recorder._executor.execute_model = lambda output: (steps.append(output), execute(output))[1]

    class Context:
        now = staticmethod(lambda: 0.0)
        take_aborts = staticmethod(tuple)
        wait = staticmethod(lambda future: future.result())

    engine.core.step(Context())
    assert engine.recorder.describe() == [describe_step(steps[0])]
    text = describe_step(steps[0])
    assert text.startswith("step 1: 3 tokens in 1 rows, 1 sampled; rows (row@computed+scheduled): 0@0+3; removed: []")
    assert "request-5 row=0 prompt=3 tokens=3 computed=0 blocks=[1]" in text
    assert "456" not in text
