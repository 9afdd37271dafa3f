"""What is refused, with which status, in which words; and what needs no engine to be answered."""

import asyncio

import pytest

from takt.engine.v1 import engine_pb2 as pb

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "hi"}]

# path, what is added to a good body, the field at fault, what the message says.
REFUSED = [
    (COMPLETIONS, {"prompt": None}, "prompt", "prompt must be set"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "prompt must be at least 1 byte long"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt must be 1 to 128 prompts, got 0 prompts"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "got 129 prompts"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "prompt must be a string, token ids, or a list of these, got a number"),
    (COMPLETIONS, {"prompt": ["a", [5]]}, "prompt[1]", "prompt[1] must be a string, got a list"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt[1]", "prompt[1] must be an integer, got a string"),
    (COMPLETIONS, {"prompt": [300]}, "prompt", "prompt must be in [0, 300), got 300"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt", "prompt must be in [0, 300)"),
    (COMPLETIONS, {"prompt": [300], "echo": True}, "prompt", "prompt must be in [0, 259), got 300"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature", "temperature must be a number, got a string"),
    (COMPLETIONS, {"temperature": True}, "temperature", "temperature must be a number, got a boolean"),
    (COMPLETIONS, {"temperature": 3}, "temperature", "temperature must be a finite number in [0, 2], got 3.0"),
    (COMPLETIONS, {"top_k": 1.5}, "top_k", "top_k must be an integer, got 1.5"),
    (COMPLETIONS, {"seed": 2**63}, "seed", "seed must be an integer of 64 bits"),
    (COMPLETIONS, {"priority": 2**31}, "priority", "priority must be an integer of 32 bits"),
    (COMPLETIONS, {"stop": [1]}, "stop[0]", "stop[0] must be a string, got a number"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias[x]", "must be named by a token id"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, "logit_bias", "logit_bias must be in [0, 300), got 300"),
    (COMPLETIONS, {"logit_bias": [1]}, "logit_bias", "logit_bias must be an object, got a list"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "logprobs must be in [0, max_logprobs 20], got 21"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1 unless echo is true, got 0"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1, got -1"),
    (COMPLETIONS, {"best_of": 2}, "best_of", "best_of must be n 1: no output is left out, got 2"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "suffix must be left out"),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search", "use_beam_search must be left out"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options", "left out unless stream is true"),
    (COMPLETIONS, {"stream": "yes"}, "stream", "stream must be true or false, got a string"),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "left out when stream is true"),
    (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format.type", "got 'xml'"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be set"),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "must be set"),
    (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs", "must be one of json, regex"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice",
     "must be the only constraint, got structured_outputs.regex and structured_outputs.choice"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json", "the only constraint"),
    (COMPLETIONS, {"structured_outputs": {"regex": ""}}, "structured_outputs.regex",
     "structured_outputs.regex must be not empty"),
    (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json must be"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern", "must be left out"),
    (CHAT, {"messages": None}, "messages", "messages must be set"),
    (CHAT, {"messages": []}, "messages", "messages must be 1 to 4096 messages, got 0 messages"),
    (CHAT, {"messages": [{}]}, "messages[0].role", "messages[0].role must be set"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list of parts"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "must be text, got 'image_url': only text is supported"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "left out unless logprobs is true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be in [0, max_logprobs 20]"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
    (CHAT, {"functions": [{"name": "x"}]}, "functions", "functions must be left out"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "modalities must be left out"),
    (CHAT, {"chat_template": "x"}, "chat_template", "chat_template must be left out"),
    (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "must be function, got 'custom'"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "tool_choice must be none without tools"),
    (CHAT, {"tool_choice": "look"}, "tool_choice", "or an object that names a function"),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "must be set"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must not set 'messages'"),
    (EMBEDDINGS, {"input": None}, "input", "input must be set"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input[1]", "input[1] must be at least 1 byte long"),
    (EMBEDDINGS, {"dimensions": 5}, "dimensions", "dimensions must be left out"),
    (EMBEDDINGS, {"encoding_format": "hex"}, "encoding_format", "must be float or base64, got 'hex'"),
]  # fmt: skip
GOOD = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": HELLO}, EMBEDDINGS: {"input": "ab"}}


async def test_what_is_refused_is_named(edge):
    for path, body, field, text in REFUSED:
        answer = await edge.request(path, GOOD[path] | body)
        assert answer.status == 400, (body, answer.body)
        error = answer.error
        assert error["type"] == "invalid_request_error"
        assert error["param"] == field, (body, error)
        assert text in error["message"], (body, error)
        assert answer.headers["x-request-id"]
    assert edge.stream.num_unread_adds == 0
    calls = edge.frontend.metric("takt_frontend_requests_total", method=COMPLETIONS, code="INVALID_ARGUMENT")
    assert calls == sum(path == COMPLETIONS for path, *_ in REFUSED)


# body, status, code, what the message says.
BODIES = [
    (b"", 400, "invalid_json", "body must be JSON"),
    (b"{", 400, "invalid_json", "at line 1, column 2"),
    (b"[]", 400, "invalid_json", "body must be a JSON object, got a list"),
    (b'{"prompt": NaN}', 400, "invalid_json", "body must be JSON"),
    (b'{"prompt": "\xff"}', 400, "invalid_json", "body must be JSON"),
    (b'{"prompt": "\\ud800"}', 400, "invalid_json", "half of a surrogate pair"),
    (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, 400, "invalid_json", "body must be JSON"),
    (b'{"prompt": ' + b"1" * 5_000 + b"}", 400, "invalid_json", "body must be JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "invalid_request", "temperature must be a finite number"),
    (b'{"prompt": "' + b"a" * 100_000 + b'"}', 413, "body_too_large", "body must be at most 50000 bytes"),
]  # fmt: skip


async def test_bodies_that_are_none(make_edge):
    async with make_edge(http_max_body_bytes=50_000) as edge:
        for body, status, code, text in BODIES:
            answer = await edge.request(COMPLETIONS, body)
            assert answer.status == status, (body[:50], answer.body)
            assert answer.error["code"] == code
            assert text in answer.error["message"]


async def test_a_body_without_an_announced_length_is_bounded_too(make_edge):
    async with make_edge(http_max_body_bytes=50_000) as edge, edge.connection() as opened:
        await opened.send(COMPLETIONS, b"", headers={"transfer-encoding": "chunked", "content-length": "0"})
    async with make_edge(http_max_body_bytes=50_000) as edge, edge.connection() as opened:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        opened.writer.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(6):
            opened.writer.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        answer = await opened.answer()
        assert answer.status == 413
        assert answer.headers["connection"] == "close"


async def test_headers_are_bounded(edge):
    async with edge.connection() as opened:
        opened.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        for _ in range(10):
            opened.writer.write(b"x" * 10_000)
        assert await opened.gone() == b""
    async with edge.connection() as opened:
        opened.writer.write(b"this is no HTTP\r\n\r\n")
        assert b"400" in await opened.gone()


async def test_paths_methods_and_types(edge):
    for path, options, status, code in [
        ("/v2/completions", {"body": {}}, 404, "unknown_path"),
        ("/v1/completions", {}, 405, "method_not_allowed"),
        ("/v1/models", {"body": {}}, 405, "method_not_allowed"),
        ("/v1/models/other", {}, 404, "model_not_found"),
        ("/v1/completions", {"body": b"a=b", "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
        ("/v1/completions", {"body": {"model": "other", "prompt": "a"}}, 404, "model_not_found"),
        ("/v1/completions", {"body": {"prompt": "a"}, "headers": {"x-request-id": "x" * 201}}, 400, "invalid_request"),
        ("/v1/completions", {"body": {"prompt": "a"}, "headers": {"x-request-timeout": "soon"}}, 400,
         "invalid_request"),
    ]:  # fmt: skip
        answer = await edge.request(path, **options)
        assert (answer.status, answer.error["code"]) == (status, code), (path, answer.body)


# google.rpc.Code of the engine's error, HTTP status, type.
CODES = [
    (3, 400, "invalid_request_error"),
    (8, 429, "rate_limit_error"),
    (12, 501, "invalid_request_error"),
    (13, 500, "server_error"),
    (14, 503, "server_error"),
    (4, 504, "server_error"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_statuses_of_failures_before_the_first_token(edge, stream):
    for code, status, kind in CODES:
        task = asyncio.create_task(edge.request(COMPLETIONS, {"prompt": "a", "stream": stream}))
        add = await edge.stream.add()
        fault = pb.EngineError(code=code, reason="SOME_REASON", message="it failed")
        await edge.stream.finish(add.handle, reason=4, error=fault)
        answer = await task
        assert (answer.status, answer.error["type"]) == (status, kind)
        assert answer.error["code"] == "some_reason"
        assert ("retry-after" in answer.headers) == (code in (8, 14))


async def test_a_deadline(edge):
    body = {"prompt": "a"}
    task = asyncio.create_task(edge.request(COMPLETIONS, body, headers={"x-request-timeout": "0.2"}))
    add = await edge.stream.add()
    assert 0 < add.deadline_remaining_ms <= 200
    answer = await task
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert (await edge.stream.abort())[0] == add.handle


async def test_a_request_id_of_the_body_is_unique(edge):
    body = {"prompt": "a", "request_id": "mine"}
    task = asyncio.create_task(edge.request(COMPLETIONS, body))
    add = await edge.stream.add()
    assert add.request_id == "cmpl-mine"
    answer = await edge.request(COMPLETIONS, body)
    assert (answer.status, answer.error["code"]) == (409, "duplicate_request")
    await edge.stream.finish(add.handle)
    assert (await task).json["id"] == "cmpl-mine"


async def test_models_and_the_rest(edge):
    models = (await edge.request("/v1/models")).json
    assert models["object"] == "list"
    (model,) = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert (await edge.request("/v1/models/tiny")).json == model
    assert (await edge.request("/version")).json["version"]
    assert (await edge.request("/health")).status == 200
    assert (await edge.request("/ping")).status == 200
    metrics = await edge.request("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b"takt_frontend_requests_in_flight 0.0" in metrics.body


async def test_tokenize_and_detokenize(edge):
    answer = await edge.request("/tokenize", {"model": "tiny", "prompt": "ab", "return_token_strs": True})
    assert answer.json == {"count": 2, "max_model_len": 256, "tokens": [67, 68], "token_strs": ["a", "b"]}
    answer = await edge.request("/tokenize", {"messages": HELLO, "add_generation_prompt": True})
    tokens = answer.json["tokens"]
    assert answer.json["token_strs"] is None
    text = (await edge.request("/detokenize", {"tokens": tokens})).json["prompt"]
    assert text == "<s>user: hi</s><s>assistant: "
    answer = await edge.request("/detokenize", {"tokens": [300]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")
    assert (await edge.request("/tokenize", {"prompt": ""})).error["param"] == "prompt"


async def test_keys_guard_everything_but_health(make_edge, tmp_path):
    file = tmp_path / "keys"
    file.write_text("secret\n")
    async with make_edge(api_key_file=str(file)) as edge:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            answer = await edge.request(path)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
            assert answer.headers["www-authenticate"] == "bearer"
            assert b"secret" not in answer.body
        assert (await edge.request("/v1/models", headers={"authorization": "Bearer wrong"})).status == 401
        assert (await edge.request("/v1/models", headers={"authorization": "Bearer secret"})).status == 200
        assert (await edge.request(COMPLETIONS, {"prompt": "a"})).status == 401
        assert (await edge.request("/health")).status == 200
