"""The tokenizer of a model folder: text to token ids and back, its chat template and its end tokens.

Knows files and the tokenizers library; no requests and no engines. It is immutable once loaded, so threads share it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from frontend_svc.text.chat_template import ChatMessage, ChatTemplate, RenderOptions
from frontend_svc.text.token_bytes import TokenBytes, read_spelling
from shared.errors import InvalidRequestError, PreconditionError, StartupError

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the folder's JSON files say; a missing file is an empty dictionary."""

    tokenizer: bytes
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]
    config: dict[str, Any]
    chat_template: str | None


class Tokenizer:
    """Encodes, decodes and renders. Made by `load`."""

    def __init__(self, files: TokenizerFiles, chat_template: str | None) -> None:
        """Raises StartupError when the tokenizer or the template cannot be read."""
        try:
            self.backend = tokenizers.Tokenizer.from_str(files.tokenizer.decode())
        except Exception as error:
            raise StartupError(f"{TOKENIZER_FILE} cannot be read: {_first_line(error)}") from error
        # The engine decides about lengths; truncation and padding of the file are for training.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.digest = hashlib.sha256(files.tokenizer).hexdigest()
        added = self.backend.get_added_tokens_decoder()
        # Above every id: added tokens may lie behind a gap.
        self.vocab_size: int = max(
            self.backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in added), 1
        )
        self.eos_token_ids = _eos_token_ids(files, self.backend)
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        spelling = read_spelling(files.tokenizer)
        # None when tokens do not stand for bytes.
        self.token_bytes = None if spelling is None else TokenBytes(self.backend, spelling, self.special_token_ids)
        # The same, in which special tokens stand for their names.
        self.all_token_bytes = None if spelling is None else TokenBytes(self.backend, spelling, ())
        self.generation_config = files.generation_config
        source = chat_template or files.chat_template
        self._template = None if source is None else ChatTemplate(source, _special_tokens(files.tokenizer_config))

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> "Tokenizer":
        """Reads the folder `path`. `chat_template`, a file's path or the template itself, overrides the model's own.

        Raises StartupError in one line.
        """
        return cls(_read_files(path), None if chat_template is None else _read_template(chat_template))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the GIL is free meanwhile, which the library grants to batches alone."""
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD. Raises InvalidRequestError for an unknown id.

        The GIL is free meanwhile.
        """
        for index in token_ids:
            self._check(index)
        (text,) = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it. Raises InvalidRequestError for an unknown id."""
        self._check(token_id)
        return self.backend.id_to_token(token_id) or ""

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            message = f"token_ids must be in [0, {self.vocab_size}), got {token_id}"
            raise InvalidRequestError(message, field="token_ids")

    @property
    def chat_template_source(self) -> str:
        """The text of the chat template; empty when there is none."""
        return "" if self._template is None else self._template.source

    def render_chat(self, messages: Sequence[ChatMessage], options: RenderOptions | None = None) -> str:
        """The prompt of a conversation, the assistant's turn opened unless `options` say otherwise.

        Raises PreconditionError without a template, InvalidRequestError when the template refuses the messages.
        """
        if self._template is None:
            raise PreconditionError("the model has no chat template; use Generate, or start with --chat-template")
        return self._template.render(messages, options or RenderOptions())

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a rendered conversation; the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def token_piece(self, token_id: int) -> tuple[str, bytes]:
        """A single token's text and bytes, of a special token its name. Bytes that are no character become U+FFFD.

        An id without a token has neither.
        """
        if self.all_token_bytes is not None:
            data = self.all_token_bytes.join((token_id,))
            return data.decode("utf-8", "replace"), data
        if not 0 <= token_id < self.vocab_size:
            return "", b""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        return text, text.encode()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"{path.name} cannot be read: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path.name} must hold a JSON object")
    return value


def _read_files(path: Path) -> TokenizerFiles:
    if not path.is_dir():
        raise StartupError(f"tokenizer folder {path} does not exist")
    try:
        tokenizer = (path / TOKENIZER_FILE).read_bytes()
    except OSError as error:
        raise StartupError(f"{path / TOKENIZER_FILE} cannot be read: {error.strerror}") from error
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    template_file = path / "chat_template.jinja"
    template = _read_text(template_file) if template_file.is_file() else _template_of(tokenizer_config)
    return TokenizerFiles(
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config,
        generation_config=_read_json(path / "generation_config.json"),
        config=_read_json(path / "config.json"),
        chat_template=template,
    )


def _template_of(tokenizer_config: dict[str, Any]) -> str | None:
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_template(value: str) -> str:
    """A template is told from a path by its braces."""
    if "{" in value:
        return value
    return _read_text(Path(value), "--chat-template ")


def _read_text(path: Path, option: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{option}{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{option}{path} cannot be read: {_first_line(error)}") from error


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """What a template may name: bos_token, eos_token, and every other token that the file gives such a name."""
    found = {name: _content(value) for name, value in tokenizer_config.items() if name.endswith("_token")}
    return {name: token for name, token in found.items() if token is not None}


def _eos_token_ids(files: TokenizerFiles, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The model's end tokens, the primary one first: of the generation config, the config, or the tokenizer."""
    for source in (files.generation_config, files.config, files.config.get("text_config")):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        values = value if isinstance(value, list) else [value]
        if all(type(index) is int and index >= 0 for index in values) and values:
            return tuple(values)
    token = _content(files.tokenizer_config.get("eos_token"))
    index = None if token is None else backend.token_to_id(token)
    return () if index is None else (index,)
