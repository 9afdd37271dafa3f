"""Options of requests through a whole stack on the embedded model, by the client."""

import math

import pytest

from takt_client.client import Client
from takt_client.errors import TaktClientError
from tests.support.embedded_models import embedded_model
from tests.support.stack import serving

QUESTION = "What is the capital of France? Answer in one sentence."
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client():
    embedded_model("smollm2")
    arguments = ("--dtype", "float32", "--num-blocks", "512", "--max-model-len", "1024")
    with serving("smollm2", *arguments) as stack, Client(stack.address) as connected:
        yield connected


def test_outputs_are_those_of_the_next_seeds(client):
    options = {"max_tokens": 12, "temperature": 1.0}
    outputs = client.chat(QUESTION, n=3, seed=7, **options).results()
    assert [output.index for output in outputs] == [0, 1, 2]
    for output in outputs:
        alone = client.chat(QUESTION, seed=7 + output.index, **options).result()
        assert output.token_ids == alone.token_ids
        assert output.text == alone.text


def test_logprobs_are_of_the_tokens_and_spell_the_text(client):
    output = client.chat(QUESTION, temperature=0, max_tokens=16, logprobs=3, prompt_logprobs=1).result()
    assert [position.token.token_id for position in output.logprobs] == list(output.token_ids)
    for position in output.logprobs:
        assert position.token.rank == 1
        assert position.candidates[0] == position.token
        assert [candidate.rank for candidate in position.candidates] == [1, 2, 3]
        assert sum(math.exp(candidate.logprob) for candidate in position.candidates) <= 1 + 1e-5
    spelled = b"".join(position.token.bytes for position in output.logprobs).decode()
    assert spelled.startswith(output.text)
    assert len(output.prompt_logprobs) == output.usage.prompt_tokens
    assert output.prompt_logprobs[0].token is None


def test_a_forbidden_and_an_only_token(client):
    greedy = {"temperature": 0, "max_tokens": 8}
    words = client.chat(QUESTION, **greedy).result()
    without = client.chat(QUESTION, bad_words=["Paris", "France"], max_tokens=16, temperature=0).result()
    assert "Paris" not in without.text
    assert "France" not in without.text
    token = words.token_ids[0]
    same = client.chat(QUESTION, allowed_token_ids=[token], **greedy).result()
    assert set(same.token_ids) == {token}


def test_vectors_have_length_one_and_tell_texts_apart(client):
    embeddings = client.embed(["A cat sleeps.", "A cat sleeps.", "Tax law is hard."], pooling="mean", normalize=True)
    one, again, other = embeddings.vectors
    assert len(one) == 576
    assert math.isclose(math.fsum(value * value for value in one), 1, rel_tol=1e-5)
    similar = math.fsum(a * b for a, b in zip(one, again, strict=True))
    different = math.fsum(a * b for a, b in zip(one, other, strict=True))
    assert similar > 1 - 1e-5 > different
    assert embeddings.usage.prompt_tokens > 10


def test_a_message_is_continued(client):
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The capital of France is"}]
    options = {"continue_final_message": True, "temperature": 0, "max_tokens": 4}
    assert client.chat(messages, **options).result().text.startswith(" Paris")


def test_what_contradicts_is_refused_by_name(client):
    with pytest.raises(TaktClientError, match="structured_output must be unset with tool_choice required"):
        client.chat(QUESTION, tools=[TOOL], tool_choice="required", structured_output={"regex": "a"}).result()
