"""Prompts equal transformers' own: the embedded chat model's template, and constructs of other models' templates."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from frontend_svc.text.chat_template import ChatMessage, RenderOptions, ToolCall
from frontend_svc.text.tokenizer import Tokenizer
from shared.errors import InvalidRequestError
from tests.support.embedded_models import embedded_model

CONVERSATIONS = {
    "single": [("user", "What is the capital of France? Answer in one sentence.")],
    "turns": [("user", "Hi"), ("assistant", "Hello!"), ("user", "中文 😀 <b> & {{ braces }}\n\n  spaces  ")],
    "system": [("system", "Be brief."), ("user", "Why?")],
    "special": [("user", "<bos>one<eos> <|im_start|>two<|im_end|></s>")],
    "empty": [("user", "")],
}
# One for each way in which templates of model families are written.
TEMPLATES = {
    # A system turn joined to the first user turn, alternation enforced, roles renamed, whitespace control.
    "turns": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set lead = messages[0]['content'] + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set lead = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\n' + (lead if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<turn>model\n' }}
{%- endif -%}
""",
    # Blocks on lines of their own, indented, without whitespace control: trimming is the environment's.
    "lines": """
{% for message in messages %}
    {% if message.role == "system" %}
System: {{ message.content }}
    {% else %}
  [{{ message.role | upper }}]
{{ message["content"] }} {{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[ASSISTANT]
{% endif %}
""",
    # Macros, namespaces, loop controls, JSON, the generation tag, tools that are absent.
    "constructs": """{% macro turn(role, text) %}<{{ role }}>{{ text | tojson }}{% endmacro %}
{% set found = namespace(last=-1, total=0) %}
{% for message in messages %}
{% set found.total = found.total + message.content | length %}
{% if message.role != 'user' %}{% continue %}{% endif %}
{% set found.last = loop.index0 %}
{% endfor %}
{% for message in messages[::-1] %}{{ turn(message.role, message.content) }}{% if loop.index > 2 %}{% break %}
{% endif %}{% endfor %}
{% generation %}{{ found.last }} {{ found.total }}{% endgeneration %}
{% if tools is defined and tools %}tools{% endif %}{% if documents %}documents{% endif %}
{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=True) }}{{ dict(a=1) | tojson }}
{% for tool in tools or [] %}{{ tool }}{% endfor %}{{ strftime_now('%Y-%m') }}""",
}


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def both(request) -> tuple[Path, Any]:
    """A model's folder and transformers' tokenizer of it."""
    # Imported here: the fast tier goes without it.
    transformers = pytest.importorskip("transformers")
    folder = embedded_model(request.param)
    return folder, transformers.AutoTokenizer.from_pretrained(folder)


@cache
def load(folder: Path, template: str | None = None) -> Tokenizer:
    return Tokenizer.load(folder, template)


def messages_of(conversation: str) -> tuple[list[dict[str, str]], list[ChatMessage]]:
    turns = CONVERSATIONS[conversation]
    return [{"role": role, "content": content} for role, content in turns], [ChatMessage(*turn) for turn in turns]


def check(ours: Tokenizer, reference: Any, conversation: str, template: str | None) -> None:
    messages, turns = messages_of(conversation)
    options = {"chat_template": template, "add_generation_prompt": True}
    assert ours.render_chat(turns) == reference.apply_chat_template(messages, tokenize=False, **options)
    token_ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.encode_chat(turns) == token_ids


@pytest.mark.model
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_constructs_equal_transformers(both, template, conversation):
    folder, reference = both
    check(load(folder, TEMPLATES[template]), reference, conversation, TEMPLATES[template])


@pytest.mark.model
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_own_template_equals_transformers(both, conversation):
    folder, reference = both
    ours = load(folder)
    assert ours.has_chat_template == (reference.chat_template is not None)
    if ours.has_chat_template:
        check(ours, reference, conversation, None)


@pytest.mark.model
def test_both_refuse_roles_that_do_not_alternate(both):
    folder, reference = both
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    # jinja's own error, which transformers lets through.
    with pytest.raises(Exception, match="roles must alternate"):
        reference.apply_chat_template(messages, chat_template=TEMPLATES["turns"], add_generation_prompt=True)
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        load(folder, TEMPLATES["turns"]).render_chat([ChatMessage(**message) for message in messages])


@pytest.mark.model
def test_encoding_and_decoding_equal_transformers(both):
    folder, reference = both
    ours = load(folder)
    for text in ("", " ", "Hello, world", "  two  spaces\n\ttab", "中文 😀 naïve", "<|im_start|>x<bos>", "a" * 3000):
        assert ours.encode(text) == reference(text)["input_ids"]
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == reference(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            expected = reference.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(token_ids, skip_special_tokens=skip) == expected


# Tools, calls, their answers and reasoning, as templates of models that call functions write them.
TOOLS_TEMPLATE = """{%- if tools %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<assistant>' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' }}{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}<response id={{ message.tool_call_id }}>{{ message.content }}</response>
{%- else %}<{{ message.role }}{{ ' ' + message.name if message.name }}>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- endif %}{{ '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if not (thinks | default(true)) %}<think></think>{% endif %}{% endif %}"""
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": "<é>"}}}


@pytest.mark.model
@pytest.mark.parametrize("continued", [False, True])
def test_tools_equal_transformers(both, continued):
    folder, reference = both
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": [1, "ü"], "a": None}}}
    messages = [
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 42  ", "reasoning_content": "sure"},
    ]
    turns = [
        ChatMessage("user", "Hi", name="ann"),
        ChatMessage("assistant", tool_calls=(ToolCall(0, "c1", "f", '{"b": [1, "ü"], "a": null}'),)),
        ChatMessage("tool", "42", tool_call_id="c1"),
        ChatMessage("assistant", "It is 42  ", reasoning="sure"),
    ]
    expected = reference.apply_chat_template(
        messages,
        tools=[FUNCTION],
        chat_template=TOOLS_TEMPLATE,
        tokenize=False,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        thinks=False,
    )
    options = RenderOptions(
        tools=[FUNCTION],
        variables={"thinks": False},
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )
    assert load(folder, TOOLS_TEMPLATE).render_chat(turns, options) == expected
