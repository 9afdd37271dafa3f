"""Loading, encoding, decoding, end tokens and templates of a model folder."""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from frontend_svc.text.chat_template import ChatMessage, ChatTemplate
from frontend_svc.text.tokenizer import Tokenizer
from shared.errors import InvalidRequestError, PreconditionError, StartupError
from tests.support.byte_tokenizer import VOCAB_SIZE, encode_bytes, write_byte_model
from tests.support.text_runs import GAP, write_with_gap

CONVERSATION = [ChatMessage("system", "Be brief."), ChatMessage("user", 'Hi <b> & "x" 中')]


@pytest.fixture
def folder(tmp_path):
    return write_byte_model(tmp_path / "model")


def test_round_trip_and_facts(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("héllo") == encode_bytes("héllo")
    assert tokenizer.decode(encode_bytes("héllo")) == "héllo"
    assert tokenizer.decode([3, *encode_bytes("a")]) == "a"
    assert tokenizer.decode([3, *encode_bytes("a")], skip_special_tokens=False) == "<|im_start|>a"
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.digest == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.token_text(3) == "<|im_start|>"


@pytest.mark.parametrize("bad", [VOCAB_SIZE, 2**31, 2**32, -1])
def test_unknown_ids_are_named(folder, bad):
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(InvalidRequestError, match=rf"\[0, {VOCAB_SIZE}\), got {bad}"):
        tokenizer.decode([5, bad])


def test_ids_behind_a_gap_are_of_the_vocabulary(tmp_path):
    tokenizer = Tokenizer.load(write_with_gap(tmp_path / "model"))
    assert tokenizer.encode("a<far>")[-1] == GAP
    assert tokenizer.vocab_size == GAP + 1
    assert tokenizer.decode([GAP - 1, GAP], skip_special_tokens=False) == "<far>"
    assert tokenizer.token_text(GAP - 1) == ""


def test_special_tokens_in_text_are_recognised_in_a_rendered_conversation(folder):
    tokenizer = Tokenizer.load(folder)
    rendered = tokenizer.render_chat(CONVERSATION)
    assert rendered.endswith("<|im_start|>assistant\n")
    assert '<b> & "x" 中' in rendered
    assert tokenizer.encode_chat(CONVERSATION)[0] == 3


def test_other_threads_run_while_a_long_text_is_encoded(folder):
    tokenizer = Tokenizer.load(folder)
    # The loop gives the GIL away in every turn and gets it back only while the worker does not hold it.
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(tokenizer.encode, "a b " * 100_000)
        turns = 0
        while not future.done():
            time.sleep(0.001)
            turns += 1
    assert turns >= 20


def test_end_tokens_come_from_the_first_file_that_names_them(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert Tokenizer.load(folder).eos_token_ids == (7, 2)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == (2,)
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    assert Tokenizer.load(folder).eos_token_ids == (9,)
    (folder / "config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("useless", [None, [], "2", ["2"], -1, True])
def test_end_tokens_that_are_no_ids_are_passed_over(folder, useless):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": useless}))
    (folder / "config.json").write_text(json.dumps({"text_config": 1}))
    assert Tokenizer.load(folder).eos_token_ids == (2,)


def test_truncation_and_padding_of_the_file_do_not_apply(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(folder).encode("longer than four")) == 16


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe"])
def test_corrupt_tokenizer_is_one_line(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(StartupError) as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value)
    assert "tokenizer.json" in str(error.value)


def test_missing_files_are_named(tmp_path, folder):
    with pytest.raises(StartupError, match="does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)
    with pytest.raises(StartupError, match=r"--chat-template .*missing\.jinja cannot be read"):
        Tokenizer.load(write_byte_model(folder), str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_other_corrupt_files_are_one_line(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(StartupError) as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_templates_that_cannot_be_read_are_one_line(folder, tmp_path):
    bad = tmp_path / "bad.jinja"
    bad.write_bytes(b"\xff\xfe")
    for value in (str(bad), str(tmp_path), "no\0path", "{% if %}", "{{ 1\n\n%}"):
        with pytest.raises(StartupError) as error:
            Tokenizer.load(folder, value)
        assert "\n" not in str(error.value)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartupError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.load(folder)


def test_templates_may_name_the_tokens_of_the_tokenizer_config(folder):
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "image_token": "<img>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    source = "{{ bos_token }}|{{ image_token }}|{{ eos_token is defined }}|{{ add_bos_token is defined }}"
    assert Tokenizer.load(folder, source).render_chat(CONVERSATION) == "<s>|<img>|False|False"


def test_template_of_the_tokenizer_config_and_overrides(folder, tmp_path):
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(PreconditionError, match="no chat template"):
        tokenizer.render_chat(CONVERSATION)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ messages|length }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(folder).render_chat(CONVERSATION) == "D2"
    (tmp_path / "own.jinja").write_text("own")
    assert Tokenizer.load(folder, str(tmp_path / "own.jinja")).render_chat(CONVERSATION) == "own"
    assert Tokenizer.load(folder, "{{ 1 + 1 }}").render_chat(CONVERSATION) == "2"


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(CONVERSATION)


def test_template_environment():
    assert render("{{ bos_token }}{% if true %}\n  x\n{% endif %}") == "<s>  x\n"
    assert render("{{ messages|tojson }}").startswith('[{"role": "system", "content": "Be brief."}')
    assert "中" in render("{{ messages[1]|tojson(indent=2) }}")
    assert (
        render("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "system"
    )
    assert render("{% generation %}{{ messages[1].role }}{% endgeneration %}") == "user"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    counting = "{% set n = namespace(count=0) %}{% for m in messages %}{% set n.count = n.count + 1 %}{% endfor %}"
    assert render(counting + "{{ n.count }}") == "2"
    assert render("{% if not tools and add_generation_prompt %}ok{% endif %}") == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ undefined.x }}",
        "{% set space = namespace(_x=1) %}",
        "{% set space = namespace() %}{% set space._x = 1 %}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_messages(source):
    with pytest.raises(InvalidRequestError) as error:
        render(source)
    assert error.value.field == "messages"
    assert error.value.message.startswith("messages ")


def test_errors_name_what_the_template_wanted_and_quote_no_prompt():
    with pytest.raises(InvalidRequestError, match="has no attribute 'tool_calls'"):
        render("{{ messages[0].tool_calls.first }}")
    with pytest.raises(InvalidRequestError, match="ValueError") as error:
        render("{{ '{:d}'.format(messages[0].content) }}{{ messages[0].content.index('?') }}")
    assert "Be brief" not in error.value.message


def test_a_template_that_is_no_template_is_a_startup_error():
    with pytest.raises(StartupError, match="chat template"):
        ChatTemplate("{% if %}", {})
