"""200 requests with random lengths, options and ends over real gRPC, against an engine whose every token is known.

The engine's KV cache is far too small for all of them, so they wait and are preempted. Each request must end exactly
once, each token must be right, and at the end nothing may be left of them.
"""

import asyncio
import random
import secrets
import time
import urllib.request
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_svc.executor.fake import fake_token, prompt_digest
from takt_client.admin import AdminClient
from takt_client.aio import AsyncClient
from takt_client.errors import TaktClientError
from takt_client.types import Chunk
from tests.support.byte_tokenizer import EOS_TOKEN_ID, NUM_SPECIAL, VOCAB_SIZE, decode_bytes
from tests.support.stack import FAKE, serving

NUM_REQUESTS = 200
CONCURRENCY = 40
MAX_MODEL_LEN = 128
# An answer's end token stands at an index below this, which prompt and seed choose.
EOS_EVERY = 60
ENGINE = (
    "--num-blocks=65",
    "--max-num-seqs=24",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--engine-arg=--block-size=8",
    "--engine-arg=--max-num-batched-tokens=48",
    "--engine-arg=--fake-step-ms=2",
    f"--engine-arg=--fake-eos-every={EOS_EVERY}",
)


@dataclass
class Plan:
    """What one request asks for, how it is ended, and what came of it."""

    number: int
    end: str
    prompt: list[int]
    options: dict
    # Chunks to read before a cancel or an abort; seconds until a deadline.
    after: float
    chunks: list[Chunk] = field(default_factory=list)
    error: TaktClientError | None = None
    abort_found: bool | None = None
    ends: int = 0

    @property
    def tokens(self):
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self):
        return "".join(chunk.text for chunk in self.chunks)


def make_plan(number, rng):
    end = rng.choices(["natural", "cancel", "abort", "deadline"], [6, 2, 2, 2])[0]
    prompt = [rng.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
    if rng.random() < 0.3:
        # A beginning that others have too: served from the prefix cache.
        prompt = [NUM_SPECIAL + 7] * 24 + prompt
    options = {"seed": rng.randrange(2**62), "max_tokens": rng.randint(1, 40), "temperature": rng.choice([0.0, 1.0])}
    if rng.random() < 0.3:
        options["stop_token_ids"] = rng.sample(range(NUM_SPECIAL, VOCAB_SIZE), 8)
        options["min_tokens"] = rng.randint(0, min(3, options["max_tokens"]))
    elif rng.random() < 0.4:
        options["stop"] = rng.sample([chr(c) for c in range(ord(" "), ord("~") + 1)], 5)
        options["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.3:
        options["ignore_eos"] = True
    if rng.random() < 0.2:
        options["priority"] = rng.randint(-3, 3)
    if rng.random() < 0.2:
        options["cache_salt"] = rng.choice("ab")
    after = rng.uniform(0.005, 0.5) if end == "deadline" else rng.randint(0, 4)
    return Plan(number, end, prompt, options, after)


def expected(plan):
    """The whole answer to a request that nobody ends: tokens, text, finish reason and stop reason."""
    options = plan.options
    count = min(options["max_tokens"], MAX_MODEL_LEN - len(plan.prompt))
    tokens = []
    for index in range(count):
        token = fake_token(plan.prompt, options["seed"], index, VOCAB_SIZE)
        stop_token_ids = options.get("stop_token_ids", ())
        while index < options.get("min_tokens", 0) and token in stop_token_ids:
            # A stop token may not be sampled yet: the fake takes the next one that is none.
            token = NUM_SPECIAL if token + 1 == VOCAB_SIZE else token + 1
        if index == prompt_digest(plan.prompt, options["seed"]) % EOS_EVERY and index >= options.get("min_tokens", 0):
            token = EOS_TOKEN_ID
        tokens.append(token)
        if token == EOS_TOKEN_ID and not options.get("ignore_eos"):
            return tokens, decode_bytes(tokens), "stop", None
        if token in stop_token_ids:
            return tokens, decode_bytes(tokens[:-1]), "stop", tokens[-1]
        text = decode_bytes(tokens)
        for stop in options.get("stop", ()):
            if text.endswith(stop):
                kept = text if options["include_stop_str_in_output"] else text[: -len(stop)]
                return tokens, kept, "stop", stop
    return tokens, decode_bytes(tokens), "length", None


async def run(plan, client):
    """Sends a request, ends it as planned, and records everything that came."""
    timeout = {"timeout": plan.after} if plan.end == "deadline" else {}
    stream = client.generate(plan.prompt, request_id=f"random-{plan.number}", **plan.options, **timeout)
    async with stream:
        try:
            if plan.end == "abort" and plan.after == 0:
                plan.abort_found = await client.abort(f"random-{plan.number}")
            async for chunk in stream:
                plan.chunks.append(chunk)
                plan.ends += chunk.finish_reason is not None
                if plan.end == "cancel" and len(plan.chunks) > plan.after:
                    return
                if plan.end == "abort" and len(plan.chunks) == plan.after:
                    plan.abort_found = await client.abort(f"random-{plan.number}")
        except TaktClientError as error:
            plan.error = error
            plan.ends += 1


def check(plan):
    """Each end exactly once, each token the one that it must be."""
    tokens, text, finish_reason, stop_reason = expected(plan)
    what = f"request {plan.number}, {plan.end}"
    assert plan.tokens == tokens[: len(plan.tokens)], what
    reasons = [chunk.finish_reason for chunk in plan.chunks]
    assert all(reason is None for reason in reasons[:-1]), what
    last = plan.chunks[-1] if plan.chunks else None
    if plan.end == "cancel":
        assert plan.error is None, what
        return
    assert plan.ends == 1, what
    if plan.error is not None:
        assert plan.end == "deadline", f"{what}: {plan.error}"
        assert plan.error.code == "DEADLINE_EXCEEDED", what
        return
    if plan.end == "abort" and last.finish_reason == "abort":
        assert plan.abort_found, what
    else:
        assert (plan.tokens, plan.text) == (tokens, text), what
        assert (last.finish_reason, last.stop_reason) == (finish_reason, stop_reason), what
    assert last.usage.prompt_tokens == len(plan.prompt), what
    assert last.usage.completion_tokens == len(plan.tokens), what
    assert last.usage.cached_tokens < len(plan.prompt), what


def metrics_of(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def wait_for_rest(admin):
    """Waits until nothing of any request is left in frontend and engine, and returns the engine's load."""
    deadline = time.monotonic() + 30
    while True:
        load = admin.get_load()
        (engine,) = load.engines
        left = (load.num_requests, engine.num_running, engine.num_waiting, engine.num_in_flight, engine.kv_cache_usage)
        if not any(left):
            return engine
        assert time.monotonic() < deadline, f"left over: {load}"
        time.sleep(0.1)


@pytest.mark.parametrize("engine_arguments", [(), ("--engine-arg=--max-concurrent-batches=3",)], ids=["one", "three"])
async def test_200_random_requests(byte_model, engine_arguments):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    plans = [make_plan(number, rng) for number in range(NUM_REQUESTS)]
    with serving(byte_model, *FAKE, *ENGINE, *engine_arguments) as stack:
        places = asyncio.Semaphore(CONCURRENCY)
        async with AsyncClient(stack.address) as client:

            async def run_in_turn(plan):
                async with places:
                    await asyncio.wait_for(run(plan, client), 120)

            await asyncio.gather(*(run_in_turn(plan) for plan in plans))
        for plan in plans:
            check(plan)
        with AdminClient(stack.admin_address) as admin:
            engine = await asyncio.to_thread(wait_for_rest, admin)
        assert engine.step_counter > 0
        metrics = await asyncio.to_thread(metrics_of, stack.services["engine-0"]["metrics_address"])
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        assert metrics["vllm:num_requests_running"] == 0
        # Otherwise the requests met with no trouble, and the test shows little.
        assert metrics["vllm:num_preemptions_total"] > 0
        assert metrics["vllm:prefix_cache_hits_total"] > 0
        assert stack.stop() == 0, stack.log
    ends = {kind: sum(plan.end == kind for plan in plans) for kind in ("natural", "cancel", "abort", "deadline")}
    aborted = sum(bool(plan.chunks) and plan.chunks[-1].finish_reason == "abort" for plan in plans)
    late = sum(plan.error is not None for plan in plans)
    print(f"{ends}, {aborted} ended by abort, {late} by their deadline")
    assert aborted
    assert late
