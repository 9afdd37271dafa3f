"""A tokenizer of bytes: vocabulary of 259 and a chat template, written as the folder that a frontend takes.

Token ids: 0 <pad>, 1 <s>, 2 </s>, then one for each byte. ASCII text of n characters is n tokens.
"""

import hashlib
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
VOCAB_SIZE = 259
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def write_tiny_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)
) -> Path:
    """Writes the folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, BOS: 1, EOS: 2} | {symbol: 3 + index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", BOS, EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "pad_token": "<pad>", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos_token_ids)}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def digest(folder: Path) -> str:
    """SHA-256 of the tokenizer's file."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def ids_of(folder: Path, text: str) -> list[int]:
    """Token ids of a text, by the library alone."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
