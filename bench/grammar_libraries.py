"""Compares the grammar libraries llguidance and xgrammar on the schemas of the tests: time, masks, coverage, bombs.

    python bench/grammar_libraries.py MODEL_FOLDER

Needs both packages. Each bomb runs in a process of its own, with 20 seconds.
"""

import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import llguidance
import numpy as np
import torch
import transformers
import xgrammar

from tests.support.json_schemas import SCHEMAS

MASKS = 24
BOMB_SECONDS = 20.0
# A schema and a value that it forbids, which a library that holds to the keyword does not accept.
KEYWORDS = {
    "not": ({"type": "string", "not": {"const": "a"}}, '"a"'),
    "if": ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, "8"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1,1]"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "[2]"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b":1}'),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    "multipleOf of an integer": ({"type": "integer", "multipleOf": 7}, "8"),
    "multipleOf of a number": ({"type": "number", "multipleOf": 0.25}, "0.3"),
    "minProperties": ({"type": "object", "minProperties": 2}, '{"a":1}'),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, '{"x":"a"}'),
    "pattern with maxLength": ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}, '"abc"'),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]}, "10"),
    "oneOf that overlaps": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, '"abc"'),
    "an unknown format": ({"type": "string", "format": "nonsense"}, None),
    "a keyword that is none": ({"type": "string", "minimumLength": 3}, None),
}


def chain(length):
    rules = "".join(f'r{index}: r{index + 1} r{index + 1} | "a"\n' for index in range(length))
    return f'start: r0\n{rules}r{length}: "b"\n'


BOMBS = {
    "regex, repeats of repeats": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "regex, automaton explodes": ("regex", "(.*a.{300})|(.*b.{400})"),
    "regex, 5,000 brackets": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "schema, string of 1e9": ("json", json.dumps({"type": "string", "minLength": 10**8, "maxLength": 10**9})),
    "schema, 2,000 deep": ("json", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
    "schema, 1,500 properties": ("json", json.dumps({"properties": {f"p{i}": {} for i in range(1500)}})),
    "schema, enum of 6,000": ("json", json.dumps({"enum": [f"v{index}" for index in range(6000)]})),
    "grammar, 3,000 rules in a chain": ("grammar", chain(3000)),
}


class LLGuidance:
    def __init__(self, folder, vocab_size, eos):
        text = (folder / "tokenizer.json").read_text()
        self.tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos))

    def compile(self, kind, text):
        matcher = llguidance.LLMatcher
        make = {"json": matcher.grammar_from_json_schema, "regex": matcher.grammar_from_regex}
        made = matcher(self.tokenizer, make.get(kind, matcher.grammar_from_lark)(text), log_level=0)
        if made.is_error():
            raise ValueError(made.get_error())
        return made

    def start(self, compiled):
        return compiled.deep_copy()

    def fill(self, matcher, words):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    def accept(self, matcher, token):
        return matcher.consume_token(token)

    def allows(self, compiled, text):
        matcher = self.start(compiled)
        return matcher.consume_tokens(self.tokenizer.tokenize_str(text)) and matcher.is_accepting()


class XGrammar:
    def __init__(self, folder, vocab_size, eos):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)

    def compile(self, kind, text):
        if kind == "json":
            return self.compiler.compile_json_schema(text, strict_mode=False)
        if kind == "regex":
            return self.compiler.compile_regex(text)
        return self.compiler.compile_grammar(text.replace("start:", "root ::=").replace(": ", " ::= "))

    def start(self, compiled):
        return xgrammar.GrammarMatcher(compiled)

    def fill(self, matcher, words):
        matcher.fill_next_token_bitmask(torch.from_numpy(words[np.newaxis]))

    def accept(self, matcher, token):
        return matcher.accept_token(token) and not matcher.is_terminated()

    def allows(self, compiled, text):
        matcher = self.start(compiled)
        return matcher.accept_string(text) and matcher.is_completed()


LIBRARIES = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def walk(library, compiled, vocab_size, seed):
    """Milliseconds of each mask along a random walk."""
    rng, matcher, times = np.random.default_rng(seed), library.start(compiled), []
    for _ in range(MASKS):
        words = np.zeros(-(-vocab_size // 32), np.int32)
        started = time.perf_counter()
        library.fill(matcher, words)
        times.append((time.perf_counter() - started) * 1e3)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0]
        if not len(allowed) or not library.accept(matcher, int(rng.choice(allowed))) or len(allowed) < 3:
            break
    return times


def percentile(values, share):
    return float(np.percentile(values, share))


def measure(name, folder, vocab_size, eos):
    started = time.perf_counter()
    library = LIBRARIES[name](folder, vocab_size, eos)
    print(f"{name}: tokenizer {time.perf_counter() - started:.2f} s")
    compiling, masks, refused = [], [], []
    for seed, (title, schema) in enumerate(SCHEMAS.items()):
        started = time.perf_counter()
        try:
            compiled = library.compile("json", json.dumps(schema))
        except Exception as error:
            refused.append(f"{title}: {str(error).splitlines()[0][:90]}")
            continue
        compiling.append((time.perf_counter() - started) * 1e3)
        masks += walk(library, compiled, vocab_size, seed)
    print(f"  compiled {len(compiling)} of {len(SCHEMAS)}; refused: {refused}")
    for what, values in (("compile", compiling), ("mask", masks)):
        shares = ", ".join(f"p{share} {percentile(values, share):.3f}" for share in (50, 90, 99))
        print(f"  {what} ms: mean {statistics.fmean(values):.3f}, {shares}, max {max(values):.3f}")
    for keyword, (schema, forbidden) in KEYWORDS.items():
        print(f"  keyword {keyword}: {held_to(library, schema, forbidden)}")


def held_to(library, schema, forbidden):
    try:
        compiled = library.compile("json", json.dumps(schema))
    except Exception as error:
        return f"refused, {str(error).splitlines()[0][:80]}"
    if forbidden is None:
        return "accepted, ignored"
    return "accepted, ignored" if library.allows(compiled, forbidden) else "held to"


def run_bomb(name, bomb, arguments, answers):
    library = LIBRARIES[name](*arguments)
    answers.put("ready")
    started = time.perf_counter()
    try:
        compiled = library.compile(*BOMBS[bomb])
        masks = walk(library, compiled, arguments[1], 1)
        answers.put(f"compiled, {time.perf_counter() - started:.2f} s, longest mask {max(masks):.1f} ms")
    except Exception as error:
        answers.put(f"error after {time.perf_counter() - started:.2f} s: {str(error).splitlines()[0][:60]}")


def try_bombs(name, arguments):
    context = multiprocessing.get_context("spawn")
    for bomb in BOMBS:
        answers = context.Queue()
        process = context.Process(target=run_bomb, args=(name, bomb, arguments, answers))
        process.start()
        answers.get(timeout=120)
        process.join(BOMB_SECONDS)
        if process.is_alive():
            process.kill()
            outcome = f"still at it after {BOMB_SECONDS:g} s"
        elif process.exitcode:
            outcome = f"the process died, exit code {process.exitcode}"
        else:
            outcome = answers.get(timeout=10)
        process.join()
        print(f"  bomb {bomb}: {outcome}")


def main():
    folder = Path(sys.argv[1])
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    arguments = (folder, vocab_size, tuple(eos) if isinstance(eos, list) else (eos,))
    for name in LIBRARIES:
        measure(name, *arguments)
        try_bombs(name, arguments)


if __name__ == "__main__":
    main()
