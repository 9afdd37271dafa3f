"""Constrained requests in the core, against the fake executor: waiting, first tokens, ends, failures, schedules."""

import itertools
import json
import random
import re
from dataclasses import replace

import pytest

from engine_svc.core.interfaces import CompiledGrammar
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from shared.errors import InvalidRequestError
from shared.types import AbortCause, FinishReason
from tests.support.byte_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, decode_bytes, encode_bytes, write_byte_model
from tests.support.core_driver import CoreDriver
from tests.support.drive import Clock, CoreLimits, Driver, make_core, make_request
from tests.support.grammars import Compilations, GrammarDriver, make_backend, spec

STOP, LENGTH, ERROR, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT


@pytest.fixture(scope="module")
def compilations(tmp_path_factory):
    backend = make_backend(write_byte_model(tmp_path_factory.mktemp("bytes")), VOCAB_SIZE)
    yield Compilations(backend)
    backend.shutdown()


def make_driver(compilations, depth=1, limits=None, **options):
    executor = FakeExecutor(
        FakeExecutorOptions(
            vocab_size=VOCAB_SIZE,
            max_model_len=(limits or CoreLimits()).max_model_len,
            max_concurrent_batches=depth,
            synchronous=True,
            **options,
        )
    )
    return GrammarDriver(make_core(executor, limits or CoreLimits(), compilations.backend), compilations)


def ask(handle, kind, text, **fields):
    fields.setdefault("eos_token_ids", (EOS_TOKEN_ID,))
    return make_request(handle, [40 + handle % 50, 41, 42], structured_output=spec(kind, text), seed=handle, **fields)


def text_of(collected):
    return decode_bytes(collected.token_ids)


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_outputs_follow_their_grammar_to_the_end(compilations, depth):
    driver = make_driver(compilations, depth)
    got = [driver.add(ask(handle, "regex", "[a-z]{3}-[0-9]{2}")) for handle in range(12)]
    driver.run()
    for collected in got:
        assert re.fullmatch("[a-z]{3}-[0-9]{2}", text_of(collected))
        assert collected.token_ids[-1] == EOS_TOKEN_ID
        assert (collected.reason, collected.finished.stop_token_id) == (STOP, None)
    assert len({text_of(collected) for collected in got}) > 1


def test_free_and_constrained_requests_share_a_batch(compilations):
    driver = make_driver(compilations)
    free = driver.add(make_request(1, [5, 6, 7], seed=3, max_tokens=8))
    held = driver.add(ask(2, "choice", '["left", "right"]'))
    alone = make_driver(compilations)
    expected = alone.add(make_request(1, [5, 6, 7], seed=3, max_tokens=8))
    driver.run()
    alone.run()
    assert free.token_ids == expected.token_ids
    assert text_of(held) in ("left", "right")


def test_the_first_token_is_constrained(compilations):
    driver = make_driver(compilations)
    got = [driver.add(ask(handle, "regex", "x", max_tokens=1)) for handle in range(8)]
    driver.run()
    for collected in got:
        assert collected.token_ids == encode_bytes("x")
        assert collected.reason is LENGTH


def test_an_output_over_max_tokens_ends_with_length(compilations):
    driver = make_driver(compilations)
    got = driver.add(ask(1, "regex", "[ab]{30}", max_tokens=10))
    driver.run()
    assert re.fullmatch("[ab]{10}", text_of(got))
    assert got.reason is LENGTH


def test_secondary_end_tokens_and_stop_tokens_end_a_complete_output(compilations):
    """The fake takes one of several allowed tokens by its own token, so each end comes up for some seed."""
    driver = make_driver(compilations)
    ends = [
        driver.add(ask(handle, "choice", '["a"]', eos_token_ids=(EOS_TOKEN_ID, 4), stop_token_ids=(5,)))
        for handle in range(24)
    ]
    driver.run()
    assert {text_of(collected) for collected in ends} == {"a"}
    assert {collected.finished.stop_token_id for collected in ends} == {None, 4, 5}


def test_without_end_tokens_a_complete_output_ends(compilations):
    driver = make_driver(compilations)
    ignoring = driver.add(ask(1, "regex", "ab", ignore_eos=True))
    without = driver.add(ask(2, "regex", "ab", eos_token_ids=()))
    empty = driver.add(ask(3, "regex", "x{0}", ignore_eos=True))
    longer = driver.add(ask(4, "regex", "a+", ignore_eos=True, max_tokens=7))
    driver.run()
    for collected, text in ((ignoring, "ab"), (without, "ab"), (empty, "")):
        assert collected.token_ids == encode_bytes(text)
        assert (collected.reason, collected.finished.stop_token_id) == (STOP, None)
    assert text_of(longer) == "aaaaaaa"
    assert longer.reason is LENGTH


def test_a_complete_output_that_is_also_at_its_length_stops(compilations):
    driver = make_driver(compilations)
    got = driver.add(ask(1, "regex", "ab", ignore_eos=True, max_tokens=2))
    driver.run()
    assert got.reason is STOP


def test_min_tokens_holds_where_the_grammar_lets_it(compilations):
    driver = make_driver(compilations)
    longer = [driver.add(ask(handle, "regex", "a*", min_tokens=6, max_tokens=12)) for handle in range(6)]
    shorter = driver.add(ask(50, "regex", "abc", min_tokens=6))
    driver.run()
    for collected in longer:
        assert re.fullmatch("a{6,12}", text_of(collected))
    assert text_of(shorter) == "abc"
    assert shorter.reason is STOP


def test_every_kind_is_followed(compilations):
    driver = make_driver(compilations, limits=CoreLimits(max_model_len=256))
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    schema["additionalProperties"] = False
    got = driver.add(ask(1, "json_schema", json.dumps(schema), max_tokens=200))
    lark = driver.add(ask(2, "grammar", 'start: "a" b\nb: "b" | "c"'))
    driver.run()
    assert 0 <= json.loads(text_of(got))["n"] <= 99
    assert text_of(lark) in ("ab", "ac")


# --- waiting ----------------------------------------------------------------------------------------------------------


class SlowBackend:
    """Answers when the test says so."""

    def __init__(self):
        self.asked, self.cancelled = [], []

    def compile(self, ticket, wanted):
        self.asked.append(ticket)

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def register_listener(self, listener): ...

    def shutdown(self): ...


def slow_driver():
    backend = SlowBackend()
    options = FakeExecutorOptions(vocab_size=VOCAB_SIZE, max_model_len=128, synchronous=True)
    return Driver(make_core(FakeExecutor(options), CoreLimits(), backend), Clock()), backend


def test_a_request_that_waits_for_its_grammar_blocks_nobody(compilations):
    driver, backend = slow_driver()
    waiting = driver.add(ask(1, "regex", "ab"))
    free = driver.add(make_request(2, [5, 6], seed=1, max_tokens=4))
    for _ in range(6):
        driver.step()
    assert free.reason is LENGTH
    assert waiting.token_ids == []
    assert waiting.first_scheduled is None
    load = driver.core.load()
    assert (load.num_waiting, load.num_waiting_tokens, load.num_running) == (1, 3, 0)
    assert driver.core.has_work()
    matcher = compilations.compile(spec("regex", "ab")).matcher
    driver.core.take_ready_grammars([CompiledGrammar(backend.asked[0], matcher)])
    driver.run()
    assert text_of(waiting) == "ab"


def test_a_grammar_that_fails_fails_alone():
    driver, backend = slow_driver()
    failing = driver.add(ask(1, "regex", "((("))
    free = driver.add(make_request(2, [5, 6], seed=1, max_tokens=4))
    error = InvalidRequestError("structured_output.regex must be better", field="structured_output.regex", reason="X")
    driver.core.take_ready_grammars([CompiledGrammar(backend.asked[0], None, error)])
    driver.run()
    assert free.reason is LENGTH
    assert failing.reason is ERROR
    told = failing.finished.error
    assert (told.code, told.reason, told.field) == (3, "X", "structured_output.regex")


def test_an_abort_while_compiling_ends_the_request(compilations):
    driver, backend = slow_driver()
    for handle in (1, 2, 3):
        driver.add(ask(handle, "regex", "ab"))
    driver.abort_now(1)
    driver.abort_now(1)
    driver.core.abort_client(1)
    assert not driver.core.has_work()
    assert backend.cancelled == backend.asked
    # An answer that comes all the same is dropped.
    driver.core.take_ready_grammars([CompiledGrammar(ticket, None) for ticket in backend.asked])
    driver.run()


def test_a_deadline_while_compiling_ends_the_request():
    driver, _ = slow_driver()
    late = driver.add(replace(ask(1, "regex", "ab"), deadline_seconds=5.0))
    driver.clock.time = 6.0
    driver.run()
    finished = late.finished
    assert (finished.reason, finished.abort_cause) == (ABORT, AbortCause.DEADLINE)


def test_a_shutdown_while_compiling_ends_the_request():
    driver, _ = slow_driver()
    waiting = driver.add(ask(1, "regex", "ab"))
    driver.core.abort_all(AbortCause.SHUTDOWN)
    driver.run()
    assert (waiting.reason, waiting.finished.abort_cause) == (ABORT, AbortCause.SHUTDOWN)


def test_an_engine_without_grammars_refuses():
    driver = CoreDriver()
    driver.add(1, structured_output=spec("regex", "a"))
    driver.run()
    assert driver.end(1).reason is ERROR
    assert driver.end(1).error.message.startswith("structured_output needs a tokenizer")


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "a" * 65537, "structured_output.regex must be at most 65536 bytes, got 65537"),
        ("regex", "a\0b", "structured_output.regex must be a text without NUL"),
        ("grammar", " \n", "structured_output.grammar must be a text that is not empty"),
        ("choice", "", "structured_output.choice must be a text that is not empty"),
    ],
)
def test_texts_over_their_limits_are_refused_before_anybody_reads_them(kind, text, said):
    driver, backend = slow_driver()
    got = driver.add(ask(1, kind, text))
    driver.run()
    assert said in got.finished.error.message
    assert backend.asked == []


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_resumed_request_goes_on_where_it_was(compilations, cut):
    whole = make_driver(compilations)
    expected = whole.add(ask(1, "regex", "[a-z]{4}-[0-9]{2}"))
    whole.run()
    driver = make_driver(compilations)
    got = driver.add(ask(1, "regex", "[a-z]{4}-[0-9]{2}", resume=expected.token_ids[:cut]))
    driver.run()
    assert expected.token_ids[:cut] + got.token_ids == expected.token_ids


def test_resumed_tokens_that_do_not_follow_the_grammar_are_refused(compilations):
    driver = make_driver(compilations)
    wrong = driver.add(ask(1, "regex", "ab", resume=encode_bytes("ac")))
    over = driver.add(ask(2, "regex", "ab", resume=[*encode_bytes("ab"), EOS_TOKEN_ID]))
    driver.run()
    assert (
        wrong.finished.error.message == "resume_token_ids must follow structured_output, got another token at index 1"
    )
    assert wrong.finished.error.code == 3
    assert over.finished.error.field == "resume_token_ids"


# --- limits and schedules ---------------------------------------------------------------------------------------------


class Exhausted:
    """A matcher that goes over its limits at the third token."""

    is_complete = False

    def __init__(self):
        self.accepted = 0

    def fill_bitmask(self, words):
        if self.accepted == 2:
            raise InvalidRequestError("structured_output must stay within its limits", reason="GRAMMAR_LIMIT")
        words[:] = -1
        return False

    def accept_token(self, token_id):
        self.accepted += 1
        return True


class Refusing(Exhausted):
    """A matcher that refuses what it allowed."""

    def accept_token(self, token_id):
        return False


@pytest.mark.parametrize(
    ("matcher", "reason", "tokens"), [(Exhausted(), "GRAMMAR_LIMIT", 2), (Refusing(), "GRAMMAR_REFUSED", 0)]
)
def test_a_matcher_that_fails_fails_its_request_alone(matcher, reason, tokens):
    driver, backend = slow_driver()
    failing = driver.add(ask(1, "regex", "a"))
    free = driver.add(make_request(2, [5, 6], seed=1, max_tokens=8))
    driver.core.take_ready_grammars([CompiledGrammar(backend.asked[0], matcher)])
    driver.run()
    assert len(failing.token_ids) == tokens
    assert failing.finished.error.reason == reason
    assert (free.reason, len(free.token_ids)) == (LENGTH, 8)


def test_a_constrained_row_is_not_scheduled_before_its_token_is_known(compilations):
    driver = make_driver(compilations, depth=3)
    # From the cache, so that both begin together.
    compilations.compile(spec("regex", "[ab]{6}"))
    held = driver.add(ask(1, "regex", "[ab]{6}"))
    driver.add(make_request(2, [5, 6], seed=1, max_tokens=60))
    row_of = {}
    executor = driver.core._executor
    in_flight = []
    original = executor.sample_tokens

    def sample(output, grammar=None):
        in_flight.append((output, grammar))
        return original(output, grammar)

    executor.sample_tokens = sample
    driver.run()
    assert re.fullmatch("[ab]{6}", text_of(held))
    for output, grammar in in_flight:
        for added in output.rows_added:
            row_of[added.request_id] = added.row
        samples = output.rows[output.samples].tolist()
        constrained = [] if grammar is None else grammar.rows.tolist()
        assert constrained == [row for row in samples if row == row_of.get("request-1")]
    steps = [output.step for output, grammar in in_flight if grammar is not None]
    assert all(after - before > 1 for before, after in itertools.pairwise(steps))


def test_rows_without_grammars_get_no_bitmask(compilations):
    driver = make_driver(compilations)
    driver.add(make_request(2, [5, 6], seed=1, max_tokens=4))
    seen = []
    executor = driver.core._executor
    original = executor.sample_tokens
    executor.sample_tokens = lambda output, grammar=None: (seen.append(grammar), original(output, grammar))[1]
    driver.run()
    assert seen
    assert all(grammar is None for grammar in seen)


CONSTRAINTS = [
    ("regex", "[a-z]{2,9}"),
    ("regex", "(ab|cd)*x"),
    ("choice", '["red", "green", "blue"]'),
    ("json_schema", '{"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}'),
    ("grammar", 'start: item*\nitem: "<" /[a-c]{1,3}/ ">"'),
]


def alone(compilations, request, max_model_len):
    driver = make_driver(compilations, limits=CoreLimits(max_model_len=max_model_len))
    collected = driver.add(request)
    driver.run()
    return collected


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_every_schedule_gives_the_same_constrained_outputs(compilations, policy, depth, seed):
    rng = random.Random(f"{policy}-{depth}-{seed}")
    limits = CoreLimits(
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_model_len=96,
        num_blocks=rng.choice([25, 30, 60]),
        policy=policy,
    )
    driver = make_driver(compilations, depth, limits)
    requests, aborted = [], set()
    while len(requests) < 24 or driver.core.has_work():
        if len(requests) < 24 and rng.random() < 0.5:
            held = rng.random() < 0.7
            kind, text = rng.choice(CONSTRAINTS)
            most = rng.randint(1, 30)
            request = make_request(
                len(requests),
                [rng.choice([5, 6])] * rng.choice([0, 4, 8])
                + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))],
                seed=rng.getrandbits(64),
                max_tokens=most,
                min_tokens=rng.choice([0, 0, most // 2]),
                ignore_eos=rng.random() < 0.2,
                structured_output=spec(kind, text) if held else None,
            )
            requests.append(request)
            driver.add(request)
        if requests and rng.random() < 0.06:
            aborted.add(rng.randrange(len(requests)))
            driver.abort_now(max(aborted))
        if rng.random() < 0.02:
            assert driver.core.reset_prefix_cache(reset_running_requests=True)
        driver.step()
    driver.run()
    for request in requests:
        collected = driver.by_key[1, request.handle]
        expected = alone(compilations, request, limits.max_model_len)
        if request.handle in aborted and collected.finished is None:
            assert expected.token_ids[: len(collected.token_ids)] == collected.token_ids
            continue
        assert collected.token_ids == expected.token_ids
        assert collected.reason is expected.reason
