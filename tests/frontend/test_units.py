"""The parts that need no gRPC: balancer, collector, the state of a stream, configuration."""

import asyncio
import random

import pytest

from frontend_svc.collector import EngineLostError, OutputCollector, Taken
from frontend_svc.config import FrontendConfig
from frontend_svc.routing.balancer import Candidate, pick
from frontend_svc.routing.convert import encode_request
from frontend_svc.routing.engine_stream import MAX_HANDLE, EngineStream
from frontend_svc.tokenizer_source import find_tokenizer
from shared.engine_client import MAX_MESSAGE_ITEMS, EngineLoss
from shared.errors import DeadlineExceededError, OverloadedError, StartupError, UnavailableError
from shared.types import (
    AbortCause,
    EngineInfo,
    EngineRequest,
    FinishedRequest,
    FinishReason,
    NumericsFingerprint,
    SamplingParams,
)
from takt.engine.v1 import engine_pb2 as pb


def candidate(index, num_in_flight=0, **fields):
    values = {"num_in_flight_at_load": 0, "num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0}
    return Candidate(index=index, num_in_flight=num_in_flight, **(values | fields))


def test_fewest_in_flight_wins_and_ties_rotate():
    assert pick([candidate(0, 3), candidate(1, 2), candidate(2, 4)], start=0) == 1
    idle = [candidate(index) for index in range(3)]
    assert [pick(idle, start) for start in range(3)] == [0, 1, 2]
    assert pick(idle[:2], start=2) == 0


def test_own_requests_are_not_counted_twice():
    own = candidate(0, 4, num_in_flight_at_load=4, num_running=4)
    foreign = candidate(1, 0, num_running=5)
    assert pick([own, foreign], start=0) == 0
    assert pick([candidate(0, 6, num_in_flight_at_load=6, num_running=6), foreign], start=0) == 1


def test_waiting_for_memory_weighs_more():
    full = candidate(0, 2, num_in_flight_at_load=2, num_running=1, num_waiting=1, kv_cache_usage=1.0)
    busy = candidate(1, 4, num_in_flight_at_load=4, num_running=4, kv_cache_usage=0.4)
    assert pick([full, busy], start=0) == 1


def test_a_burst_is_spread_evenly_before_any_load_is_told():
    counts = [0] * 5
    start = 0
    for _ in range(100):
        index = pick([candidate(i, count) for i, count in enumerate(counts)], start)
        counts[index] += 1
        start = (index + 1) % 5
    assert counts == [20] * 5


# --- the collector ----------------------------------------------------------------------------------------------------


def finished(reason=FinishReason.LENGTH):
    return FinishedRequest(handle=1, reason=reason)


async def test_unread_tokens_are_merged_and_the_end_comes_with_them():
    collector = OutputCollector(10, lambda: None)
    collector.on_token(1)
    collector.on_tokens([2, 3])
    collector.on_finished(finished())
    assert await collector.take() == Taken([1, 2, 3], finished())


async def test_the_first_end_counts_and_tokens_come_before_an_error():
    collector = OutputCollector(10, lambda: None)
    collector.on_token(1)
    collector.fail(DeadlineExceededError("late"))
    collector.on_finished(finished())
    collector.on_lost(EngineLoss("a:1", "gone", crashed=True, drained=False))
    assert await collector.take() == Taken([1])
    with pytest.raises(DeadlineExceededError):
        await collector.take()


async def test_a_waiting_reader_is_woken_by_each_kind_of_news():
    collector = OutputCollector(10, lambda: None)
    taking = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    collector.on_token(7)
    assert await taking == Taken([7])
    taking = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    collector.on_lost(EngineLoss("a:1", "gone", crashed=True, drained=False))
    with pytest.raises(EngineLostError, match="engine a:1 was lost: gone"):
        await taking


async def test_too_many_unread_tokens_are_reported():
    reports = []
    collector = OutputCollector(3, lambda: reports.append(1))
    collector.on_tokens([1, 2, 3])
    assert not reports
    collector.on_token(4)
    assert reports
    assert (await collector.take()).token_ids == [1, 2, 3, 4]


# --- the stream -------------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self):
        self.tokens, self.ends, self.losses = [], [], []

    def on_first_scheduled(self, first):
        pass

    def on_token(self, token_id):
        self.tokens.append(token_id)

    def on_tokens(self, token_ids):
        self.tokens += token_ids

    def on_finished(self, end):
        self.ends.append(end)

    def on_lost(self, loss):
        self.losses.append(loss)


def info(**fields):
    values = {
        "epoch": "e",
        "model": "m",
        "max_model_len": 100,
        "vocab_size": 300,
        "eos_token_ids": (2,),
        "tokenizer_digest": "",
        "block_size": 16,
        "num_blocks": 10,
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_stop_token_ids": 128,
        "max_message_bytes": 2**26,
        "numerics": NumericsFingerprint(),
    }
    return EngineInfo(**(values | fields))


def request(prompt=(5,)):
    return EngineRequest(handle=0, request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4))


def sent(stream):
    return [pb.ConnectRequest.FromString(frame) for frame in stream.take_frames()]


async def test_what_is_queued_together_travels_together_adds_before_aborts():
    stream = EngineStream("a:1", info())
    first, second = stream.add_request(request(), Sink()), stream.add_request(request(), Sink())
    assert stream.wake.is_set()
    (adds,) = sent(stream)
    assert len(adds.add_requests.requests) == 2
    assert not stream.wake.is_set()
    stream.abort_request(first, AbortCause.DEADLINE)
    stream.abort_request(second, AbortCause.CLIENT)
    third = stream.add_request(request(), Sink())
    adds, aborts = sent(stream)
    assert pb.AddRequest.FromString(adds.add_requests.requests[0]).handle == third
    assert list(aborts.abort_requests.handles) == [first, second]
    assert list(aborts.abort_requests.causes) == [AbortCause.DEADLINE, AbortCause.CLIENT]


async def test_messages_hold_no_more_items_than_an_engine_takes():
    stream = EngineStream("a:1", info())
    handles = [stream.add_request(request(), Sink()) for _ in range(MAX_MESSAGE_ITEMS + 1)]
    assert [len(message.add_requests.requests) for message in sent(stream)] == [MAX_MESSAGE_ITEMS, 1]
    for handle in handles:
        stream.abort_request(handle, AbortCause.CLIENT)
    messages = sent(stream)
    assert [len(message.abort_requests.handles) for message in messages] == [MAX_MESSAGE_ITEMS, 1]
    assert [handle for message in messages for handle in message.abort_requests.handles] == handles


async def test_a_request_that_nobody_waits_for_is_never_sent():
    stream = EngineStream("a:1", info())
    handle = stream.add_request(request(), Sink())
    stream.abort_request(handle, AbortCause.CLIENT)
    stream.abort_request(handle, AbortCause.CLIENT)
    stream.abort_request(99, AbortCause.CLIENT)
    assert sent(stream) == []
    assert stream.num_in_flight == 0


async def test_large_requests_are_split_and_too_large_ones_refused():
    stream = EngineStream("a:1", info())
    for _ in range(5):
        stream.add_request(request([250] * 300_000), Sink())
    assert [len(frame.add_requests.requests) for frame in sent(stream)] == [1, 1, 1, 1, 1]
    small = EngineStream("a:1", info(max_message_bytes=1_000))
    with pytest.raises(OverloadedError, match="at most 936 bytes for the engine, got"):
        small.add_request(request([250] * 1_000), Sink())
    assert sent(small) == []
    assert small.num_in_flight == 0


async def test_a_loss_tells_what_was_sent_from_what_was_not():
    stream = EngineStream("a:1", info())
    before, after = Sink(), Sink()
    stream.add_request(request(), before)
    sent(stream)
    stream.add_request(request(), after)
    stream.close("boom")
    assert [loss.crashed for loss in before.losses] == [True]
    assert [loss.crashed for loss in after.losses] == [False]
    with pytest.raises(UnavailableError):
        stream.add_request(request(), Sink())


async def test_numbers_are_not_used_again():
    stream = EngineStream("a:1", info(), last_handle=MAX_HANDLE - 1)
    sink = Sink()
    assert stream.add_request(request(), sink) == MAX_HANDLE
    assert not stream.is_used_up
    with pytest.raises(UnavailableError):
        stream.add_request(request(), Sink())
    stream.receive(outputs(finished=[pb.Finished(handle=MAX_HANDLE, reason=2)]))
    assert sink.ends
    assert stream.is_used_up


def outputs(**fields):
    return pb.ConnectResponse(step_outputs=pb.StepOutputs(**fields)).SerializeToString()


async def test_columns_reach_their_requests_whatever_their_shape():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stream = EngineStream("a:1", info())
    sinks = {}
    for _ in range(20):
        sink = Sink()
        sinks[stream.add_request(request(), sink)] = sink
    expected = {handle: [] for handle in sinks}
    for _ in range(200):
        handles = rng.sample(sorted(sinks), rng.randrange(20))
        counts = [rng.randrange(4) for _ in handles] if rng.random() < 0.5 and handles else [1] * len(handles)
        tokens = [[rng.randrange(300) for _ in range(count)] for count in counts]
        columns = [] if all(count == 1 for count in counts) else counts
        # Numbers of nobody are ignored.
        stream.receive(
            outputs(
                handles=[*handles, 10_000],
                num_tokens=[*columns, 1] if columns else [],
                token_ids=[token for ids in tokens for token in ids] + [1],
            )
        )
        for handle, ids in zip(handles, tokens, strict=True):
            expected[handle] += ids
    assert {handle: sink.tokens for handle, sink in sinks.items()} == expected


async def test_messages_of_a_newer_engine_are_passed_over():
    stream = EngineStream("a:1", info())
    sink = Sink()
    handle = stream.add_request(request(), sink)
    # Field 100, a varint: no message that is known here.
    assert stream.receive(b"\xa0\x06\x05") is None
    assert stream.receive(b"") is None
    stream.receive(outputs(finished=[pb.Finished(handle=handle, reason=99)]))
    assert sink.ends[0].reason is FinishReason.ABORT


def test_a_request_survives_the_wire():
    data = encode_request(request([1, 2, 3]), 9)
    message = pb.AddRequest.FromString(data)
    assert (message.handle, list(message.prompt_token_ids), message.sampling.max_tokens) == (9, [1, 2, 3], 4)
    assert not message.HasField("data_parallel_rank")


# --- configuration ----------------------------------------------------------------------------------------------------


def test_names_and_sources():
    config = FrontendConfig(model="m", engine=("a:1",))
    assert (config.tokenizer_source, config.model_names) == ("m", ("m",))
    config = FrontendConfig(model="m", tokenizer="t", engine=("a:1", "[::1]:2"), served_model_name=("x", "y"))
    assert (config.tokenizer_source, config.model_names) == ("t", ("x", "y"))


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:0", "a:x", "a:65536"])
def test_addresses_are_checked(address):
    with pytest.raises(StartupError, match="--engine must be HOST:PORT"):
        FrontendConfig(model="m", engine=(address,))


def test_a_pulled_model_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TAKT_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "smollm2"
    folder.mkdir(parents=True)
    with pytest.raises(StartupError, match="takt model pull"):
        find_tokenizer("smollm2")
    (folder / "tokenizer.json").write_text("{}")
    assert find_tokenizer("smollm2") == folder


def test_the_empty_name_is_not_the_working_directory():
    with pytest.raises(StartupError, match="got nothing"):
        find_tokenizer("")


def test_a_gguf_file_is_found_by_what_was_converted_from_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TAKT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(StartupError, match="is not converted yet"):
        find_tokenizer(str(file))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_tokenizer(str(file)) == tmp_path
