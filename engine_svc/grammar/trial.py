"""The process of trials: every grammar is compiled here first, where it can do no harm.

Reads questions from standard input and answers on standard output, one at a time, each a JSON text behind its length
in 4 bytes. Memory is limited, and the stack is smaller than that of the engine's threads, so that whatever is compiled
here is compiled there too. A grammar that kills this process, or takes too long in it, is refused. Ends with its input.
"""

import json
import resource
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from engine_svc.grammar.compiler import Compiler, GrammarError, load_compiler
from engine_svc.grammar.source import field_of, grammar_source
from shared.errors import TaktError
from shared.types import StructuredOutputKind, StructuredOutputSpec

MEMORY_BYTES = 2 << 30
STACK_BYTES = 2 << 20
LENGTH = struct.Struct("<I")


def read_message(stream: BinaryIO) -> Any:
    """The next message, None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return json.loads(stream.read(length))


def message_bytes(value: Any) -> bytes:
    """A message as it crosses."""
    data = json.dumps(value).encode()
    return LENGTH.pack(len(data)) + data


def answer(compiler: Compiler, question: dict[str, Any]) -> dict[str, Any]:
    """The grammar of a spec as the library takes it, or the error of one that cannot be compiled."""
    spec = StructuredOutputSpec(StructuredOutputKind(question["kind"]), question["spec"])
    try:
        source = grammar_source(spec)
        compiler.compile(source)
    except TaktError as error:
        return {"code": error.code, "message": error.message, "reason": error.reason, "field": error.field}
    except GrammarError as error:
        field = field_of(spec)
        message = f"{field} must be one that can be compiled, got {error}"
        return {"code": 3, "message": message, "reason": "GRAMMAR_NOT_COMPILED", "field": field}
    except Exception as error:  # noqa: BLE001 - the library raises what its readers raise
        message = f"{field_of(spec)} must be one that can be compiled, got {type(error).__name__}"
        return {"code": 3, "message": message, "reason": "GRAMMAR_NOT_COMPILED", "field": field_of(spec)}
    return {"source": source}


def _serve(folder: str, vocab_size: str, eos_token_ids: list[str]) -> None:
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    compiler = load_compiler(Path(folder), int(vocab_size), tuple(map(int, eos_token_ids)))
    while (question := read_message(questions)) is not None:
        answers.write(message_bytes(answer(compiler, question)))
        answers.flush()


def main() -> None:
    """Serves until the input ends. The arguments are the model's folder, its vocabulary's size and its end tokens."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.argv[1], sys.argv[2], sys.argv[3:]))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
