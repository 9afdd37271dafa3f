"""A model folder that has a tokenizer and no weights: 32 special tokens, then one token for each byte.

Texts and token ids can be computed by hand: byte b is token 32 + b. It serves a frontend in front of fake engines.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_SPECIAL = 32
VOCAB_SIZE = NUM_SPECIAL + 256
EOS_TOKEN_ID = 2
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(5, NUM_SPECIAL))]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def encode_bytes(text: str) -> list[int]:
    """The tokens of a text without special tokens."""
    return [NUM_SPECIAL + byte for byte in text.encode()]


def decode_bytes(token_ids: list[int]) -> str:
    """The text of tokens, special ones left out."""
    return bytes(token - NUM_SPECIAL for token in token_ids if token >= NUM_SPECIAL).decode("utf-8", "replace")


def write_byte_model(folder: Path) -> Path:
    """Writes the folder's files and returns it."""
    characters = byte_characters()
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {characters[byte]: NUM_SPECIAL + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID},
        "generation_config.json": {"eos_token_id": EOS_TOKEN_ID},
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
