"""Whole requests through a frontend and a real engine core with the fake executor."""

from engine_svc.executor.fake import fake_token
from takt.v1 import inference_pb2, types_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import frontend_in_process

VOCAB = 259


def expected(prompt, seed, count):
    return [fake_token(prompt, seed, index, VOCAB) for index in range(count)]


async def test_text_goes_in_and_text_comes_out(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=VOCAB, max_model_len=256) as engine,
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
