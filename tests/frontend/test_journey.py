"""Whole requests through a frontend and real engine cores with the fake executor, whose every token is known."""

import asyncio
import random
import threading

import grpc

from engine_svc.executor.fake import fake_token
from takt.v1 import inference_pb2, types_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import collect, frontend_in_process
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer


def expected(prompt, seed, count):
    return [fake_token(prompt, seed, index, VOCAB_SIZE) for index in range(count)]


async def test_text_goes_in_and_text_comes_out(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        tokenized = await frontend.stub.Tokenize(inference_pb2.TokenizeRequest(text="hello"))
        answer = await frontend.answer("hello", seed=7, max_tokens=12, ignore_eos=True)
        assert answer.error is None
        assert answer.token_ids == expected(list(tokenized.token_ids), 7, 12)
        whole = await frontend.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=answer.token_ids))
        assert answer.text == whole.text
        assert answer.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert answer.last.usage.prompt_tokens == 5
        assert answer.last.usage.completion_tokens == 12
        assert answer.last.timings.e2e_seconds >= answer.last.timings.time_to_first_token_seconds > 0
        await frontend.idle()


async def test_many_requests_over_two_engines_are_never_mixed_up(tokenizer_folder):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as one,
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)

        async def request():
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
            key, count, cancelled = rng.randrange(2**62), rng.randint(1, 80), rng.random() < 0.3
            call = frontend.generate(prompt, seed=key, max_tokens=count, ignore_eos=True)
            if cancelled:
                await call.read()
                call.cancel()
                return
            answer = await collect(call)
            assert answer.token_ids == expected(prompt, key, count)
            assert answer.last.usage.completion_tokens == count

        await asyncio.wait_for(asyncio.gather(*(request() for _ in range(80))), 60)
        await frontend.idle()
        for engine in (one, two):
            await frontend.until(lambda engine=engine: engine.core.load().kv_cache_usage == 0)
            assert engine.core.load().step_counter > 0


async def test_end_tokens_that_the_engine_does_not_have_are_not_asked_for(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "odd", eos_token_ids=(2, 50_256))
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as engine,
        frontend_in_process(folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        answer = await frontend.answer("hello", max_tokens=3, ignore_eos=True)
        assert len(answer.token_ids) == 3


async def test_an_engine_that_crashes_costs_no_request_that_has_no_output(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256, fail_at_step=1) as failing,
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as healthy,
        frontend_in_process(tokenizer_folder, failing.address, healthy.address) as frontend,
    ):
        await frontend.wait_ready(2)
        prompts = [[10 + index, 11, 12] for index in range(12)]
        answers = await asyncio.gather(
            *(frontend.answer(prompt, seed=1, max_tokens=5, ignore_eos=True) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.error is None:
                assert answer.token_ids == expected(prompt, 1, 5)
            else:
                # It had begun to answer.
                assert answer.code == grpc.StatusCode.UNAVAILABLE
                assert answer.info.metadata["tokens_emitted"] != "0"
        assert frontend.metric("takt_frontend_zero_token_retries_total") > 0
        assert sum(answer.error is None for answer in answers) >= 6


async def test_a_deadline_is_kept_by_the_engine_while_it_computes_others(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=2048, step_seconds=0.005, max_num_seqs=1) as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        first = frontend.generate("a", ignore_eos=True)
        await first.read()
        waiting = await frontend.answer("b", timeout=0.2)
        assert waiting.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await frontend.until(lambda: engine.core.load().num_waiting == 0)
        first.cancel()
        await frontend.idle()


async def test_long_texts_are_tokenized_beside_the_loop(tokenizer_folder, monkeypatch):
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=20_000) as engine,
        frontend_in_process(tokenizer_folder, engine.address, tokenize_timeout=0.2) as frontend,
    ):
        await frontend.wait_ready()
        tokenizer = frontend.frontend._services.tokenizer
        threads, encode = [], tokenizer.encode
        held = threading.Event()

        def noted(text, add_special_tokens=True):
            threads.append(threading.current_thread() is threading.main_thread())
            if len(text) == 10_001:
                held.wait(20)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", noted)
        for size, on_loop in ((100, True), (10_000, False)):
            answer = await frontend.answer("x" * size, max_tokens=1)
            assert answer.last.usage.prompt_tokens == size
            assert threads.pop() is on_loop
        stuck = await frontend.answer("x" * 10_001)
        assert stuck.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stuck.info.reason == "TOKENIZE_TIMEOUT"
        held.set()


async def test_several_outputs_are_those_of_requests_with_the_next_seeds(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        prompt = [10, 20, 30]
        for seed in (5, -1 + 2**63, -2):
            answer = await frontend.answer(prompt, n=4, seed=seed, max_tokens=9, ignore_eos=True, logprobs=1)
            assert answer.error is None
            for index in range(4):
                messages = [message for message in answer.messages if message.index == index]
                tokens = [token for message in messages for token in message.token_ids]
                assert tokens == expected(prompt, (seed + index) % 2**64, 9)
                told = [position.token.token_id for message in messages for position in message.logprobs]
                assert told == tokens
        await frontend.idle()
        await frontend.until(lambda: engine.core.load().kv_cache_usage == 0)


async def test_random_requests_of_several_outputs_leave_nothing_behind(tokenizer_folder):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with (
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as one,
        engine_in_process(vocab_size=VOCAB_SIZE, max_model_len=256) as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)

        async def request():
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
            key, count, n = rng.randrange(2**62), rng.randint(1, 40), rng.randint(1, 5)
            kind, interval = rng.randrange(4), rng.randint(1, 6)
            fields = {"seed": key, "max_tokens": count, "ignore_eos": True, "n": n}
            call = frontend.generate(prompt, output_kind=kind, stream_interval=interval, **fields)
            if rng.random() < 0.3:
                await call.read()
                call.cancel()
                return
            answer = await collect(call)
            for index in range(n):
                messages = [message for message in answer.messages if message.index == index]
                assert [message.HasField("finish_reason") for message in messages][-1]
                told = messages[-1:] if kind >= 2 else messages
                tokens = [token for message in told for token in message.token_ids]
                assert tokens == expected(prompt, (key + index) % 2**64, count)

        await asyncio.wait_for(asyncio.gather(*(request() for _ in range(60))), 60)
        await frontend.idle()
        for engine in (one, two):
            await frontend.until(lambda engine=engine: engine.core.load().kv_cache_usage == 0)
