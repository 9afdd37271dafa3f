"""Rendered conversations equal transformers' own, for the embedded chat model."""

import pytest

from frontend_svc.text.chat_template import ChatMessage
from frontend_svc.text.tokenizer import Tokenizer
from tests.support.embedded_models import embedded_model

CONVERSATIONS = [
    [("user", "What is the capital of France? Answer in one sentence.")],
    [("user", "Hi"), ("assistant", "Hello!"), ("user", "中文 😀 <b> & {{ braces }}\n\n  spaces  ")],
    [("system", "Be brief."), ("user", "Why?")],
]


@pytest.mark.model
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["single", "turns", "system"])
def test_prompts_equal_transformers(conversation):
    # Imported here: the fast tier goes without it.
    transformers = pytest.importorskip("transformers")
    folder = embedded_model("smollm2")
    messages = [{"role": role, "content": content} for role, content in conversation]
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    turns = [ChatMessage(role, content) for role, content in conversation]
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(turns) == text
    assert ours.encode_chat(turns) == reference(text, add_special_tokens=False)["input_ids"]
