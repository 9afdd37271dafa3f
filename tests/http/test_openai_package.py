"""The official openai package against a whole stack with the embedded model."""

import base64
import json
import math
import struct

import jsonschema
import openai
import pytest

from tests.support.embedded_models import embedded_model
from tests.support.stack import serving

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack():
    with serving(embedded_model("smollm2"), "--served-model-name", "smollm2", "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=stack.http_url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def grammar(client):
    """Skips what needs an engine that keeps outputs to a grammar, where there is none."""
    try:
        client.completions.create(model="smollm2", prompt="a", max_tokens=1, extra_body={"guided_choice": ["b"]})
    except openai.APIStatusError as error:
        if error.status_code != 501:
            raise
        pytest.skip("the engine builds no structured output")


def test_models(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").object == "model"
    with pytest.raises(openai.NotFoundError, match="model must be one of smollm2"):
        client.models.retrieve("other")


def test_a_chat_whole_and_streamed(client):
    options = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**options)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_of_text_and_of_tokens(stack, client):
    options = {"model": "smollm2", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(prompt="The capital of France is", **options)
    assert "Paris" in whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    tokens = client.post("../tokenize", body={"prompt": "The capital of France is"}, cast_to=object)["tokens"]
    stream = client.completions.create(prompt=tokens, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    both = client.completions.create(
        prompt=["The capital of France is", tokens and "One, two,"], n=2, seed=1, **{**options, "temperature": 1}
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]


def test_logprobs(client):
    options = {"model": "smollm2", "temperature": 0}
    chat = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, max_tokens=5, **options)
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert "".join(position.token for position in content) == chat.choices[0].message.content
    for position in content:
        # Greedy: the token is the most likely one.
        assert position.top_logprobs[0].token == position.token
        assert position.logprob == position.top_logprobs[0].logprob <= 0
        assert len(position.top_logprobs) == 3
        assert bytes(position.bytes).decode() == position.token
    echo = client.completions.create(prompt="One, two,", echo=True, logprobs=2, max_tokens=0, **options)
    found = echo.choices[0].logprobs
    assert echo.choices[0].text == "".join(found.tokens) == "One, two,"
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert found.text_offset == [sum(map(len, found.tokens[:index])) for index in range(len(found.tokens))]


def test_several_outputs_of_one_stream(client):
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, n=3, seed=3, temperature=1, max_tokens=8, stream=True
    )
    ends = [choice.index for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_embeddings(client):
    options = {"model": "smollm2", "input": ["A cat sat.", "A cat was sitting.", "Stock prices fell."]}
    # The package itself asks for base64, unless told otherwise.
    vectors = [entry.embedding for entry in client.embeddings.create(**options).data]
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-4) for vector in vectors)
    numbers = client.embeddings.create(**options, encoding_format="float")
    assert [entry.embedding for entry in numbers.data] == [pytest.approx(vector, abs=1e-6) for vector in vectors]
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens > 3
    text = client.embeddings.create(**options, encoding_format="base64").data[0].embedding
    data = base64.b64decode(text)
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(vectors[0], abs=1e-6)


def test_errors_are_the_packages_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_a_stream_that_is_closed_ends_its_request(stack, client):
    stream = client.completions.create(
        model="smollm2", prompt="Once", max_tokens=2_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    # The next answer comes at once: nothing else runs.
    client.completions.create(model="smollm2", prompt="a", max_tokens=1)


# --- what needs a grammar ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("grammar")
def test_a_json_schema(client):
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Describe a person as JSON."}],
            response_format=response_format,
            max_tokens=200,
            temperature=1,
            seed=seed,
        )
        if answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)


@pytest.mark.usefixtures("grammar")
def test_tools(client):
    options = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "max_tokens": 200,
        "temperature": 0,
    }
    required = client.chat.completions.create(tool_choice="required", **options)
    assert required.choices[0].finish_reason == "tool_calls"
    for call in required.choices[0].message.tool_calls:
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(tool_choice=named, stream=True, **options)
    deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert deltas[0].id
    assert deltas[0].function.name == "get_weather"
    arguments = "".join(delta.function.arguments for delta in deltas)
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])


@pytest.mark.usefixtures("grammar")
@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, ("aa", "ab", "ba", "bb")),
        ({"guided_choice": ["maybe"]}, ("maybe",)),
    ],
)
def test_other_constraints(client, constraint, texts):
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=20, extra_body=constraint)
    assert answer.choices[0].message.content in texts
