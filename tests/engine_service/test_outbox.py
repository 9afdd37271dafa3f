"""The outbox alone: order, merging, splitting, bounds."""

import asyncio
import random

import pytest

from engine_svc.service.outbox import Outbox, OutboxLimits, estimate_bytes, split
from shared.types import EngineLoad, FinishedRequest, FinishReason, FirstScheduled, StepOutputs, WireError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make(**limits):
    """An outbox whose encoding keeps the outputs as they are, for looking at."""
    sent, clock = [], Clock()

    def encode(outputs):
        sent.append(outputs)
        return b"o" * estimate_bytes(outputs)

    return Outbox(OutboxLimits(**limits), encode, clock), sent, clock


def step(number, **tokens):
    handles = [int(name[1:]) for name in tokens]
    counts = [len(ids) for ids in tokens.values()]
    flat = [token for ids in tokens.values() for token in ids]
    return StepOutputs(
        step=number,
        handles=handles,
        num_tokens=None if all(count == 1 for count in counts) else counts,
        token_ids=flat,
        load=EngineLoad(step_counter=number),
    )


def finished(handle, **values):
    return FinishedRequest(handle=handle, reason=FinishReason.STOP, **values)


def tokens_by_handle(messages):
    """Tokens in the order of the messages; also checks that nothing comes after an end or before a start."""
    result, ended, started = {}, set(), set()
    for message in messages:
        started.update(first.handle for first in message.first_scheduled)
        start = 0
        for index, handle in enumerate(message.handles):
            assert handle not in ended
            count = 1 if message.num_tokens is None else message.num_tokens[index]
            result.setdefault(handle, []).extend(message.token_ids[start : start + count])
            start += count
        assert start == len(message.token_ids)
        ended.update(end.handle for end in message.finished)
    return result, ended


async def test_a_step_that_is_taken_at_once_passes_as_it_is():
    outbox, sent, _ = make()
    outputs = step(1, h1=[5], h2=[6])
    outbox.put_outputs(outputs)
    assert len(await outbox.take()) == 1
    assert sent == [outputs]
    assert sent[0] is outputs
    assert outbox.num_merged == 0


async def test_what_is_not_taken_is_merged_by_request():
    outbox, sent, _ = make()
    outbox.put_outputs(step(1, h1=[5], h2=[6]))
    outbox.put_outputs(step(2, h2=[7, 8], h3=[9]))
    outputs = step(3, h1=[10])
    outputs.finished.append(finished(2))
    outputs.first_scheduled.append(FirstScheduled(1, 0, 0.0))
    outbox.put_outputs(outputs)
    assert outbox.num_tokens == 6
    await outbox.take()
    (merged,) = sent
    assert (merged.step, merged.load.step_counter) == (3, 3)
    assert merged.handles == [1, 2, 3]
    assert merged.num_tokens == [2, 3, 1]
    assert merged.token_ids == [5, 10, 6, 7, 8, 9]
    assert [end.handle for end in merged.finished] == [2]
    assert outbox.num_tokens == 0


async def test_order_of_messages_and_the_last_one():
    outbox, _, _ = make()
    outbox.put_frame(b"ready")
    outbox.put_heartbeat(b"beat 1")
    outbox.put_outputs(step(1, h1=[5]))
    outbox.put_frame(b"result")
    outbox.put_heartbeat(b"beat 2")
    outbox.close(b"dead")
    outbox.put_frame(b"too late")
    outbox.put_outputs(step(2, h1=[6]))
    outbox.close(b"again")
    frames = await outbox.take()
    assert [frames[0], *frames[2:]] == [b"ready", b"result", b"beat 2", b"dead"] or frames[1:] == [
        b"ready",
        b"result",
        b"beat 2",
        b"dead",
    ]
    assert await outbox.take() == []


async def test_take_waits():
    outbox, _, _ = make()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put_frame(b"a")
    assert await taking == [b"a"]
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.drop()
    assert await taking == []


async def test_bounds():
    outbox, _, clock = make(max_bytes=1000, max_stall_seconds=10)
    assert not outbox.overdue()
    clock.now += 100
    assert not outbox.overdue(), "nothing to take is no stall"
    outbox.put_frame(b"x" * 600)
    assert not outbox.overdue(), "the stall counts from here"
    (frame,) = await outbox.take()
    outbox.put_frame(b"x" * 600)
    assert "1200 bytes" in outbox.overdue(), "what is being written counts too"
    outbox.progressed(frame)
    assert not outbox.overdue()
    clock.now += 11
    assert "nothing was read for 11 s" in outbox.overdue()
    await outbox.take()
    outbox.progressed(b"x" * 600)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    clock.now += 100
    assert not outbox.overdue()
    outbox.drop()
    await taking


@pytest.mark.parametrize("seed", range(5))
def test_split_keeps_everything_in_order(seed):
    rng = random.Random(seed)
    print("seed", seed)
    outputs = StepOutputs(step=7, num_tokens=[], load=EngineLoad(step_counter=7))
    for handle in range(200):
        count = rng.choice([1, 3, 50, 2000])
        outputs.handles.append(handle)
        outputs.num_tokens.append(count)
        outputs.token_ids += [rng.randrange(2**31) for _ in range(count)]
        outputs.first_scheduled.append(FirstScheduled(handle, 0, 0.0))
        error = WireError(3, "X", "m" * rng.randrange(1000)) if rng.random() < 0.5 else None
        outputs.finished.append(finished(handle, error=error))
    parts = list(split(outputs, 8000))
    assert len(parts) > 10
    assert all(estimate_bytes(part) <= 8000 for part in parts)
    assert tokens_by_handle(parts) == tokens_by_handle([outputs])
    assert [f.handle for part in parts for f in part.first_scheduled] == list(range(200))
    assert [f for part in parts for f in part.finished] == outputs.finished
    assert all(part.step == 7 and part.load == outputs.load for part in parts)


def test_split_of_a_small_step_is_the_step():
    outputs = step(1, h1=[5])
    assert list(split(outputs, 1000)) == [outputs]


async def test_random_puts_and_takes_lose_nothing():
    for seed in range(20):
        print("seed", seed)
        rng = random.Random(seed)
        outbox, sent, _ = make(max_message_bytes=rng.choice([100, 1000, 1 << 20]))
        expected, open_handles = {}, set(range(10))
        for number in range(100):
            chosen = [h for h in open_handles if rng.random() < 0.6]
            outputs = step(number, **{f"h{h}": [rng.randrange(1000) for _ in range(rng.randint(1, 3))] for h in chosen})
            start = 0
            for index, handle in enumerate(outputs.handles):
                count = 1 if outputs.num_tokens is None else outputs.num_tokens[index]
                expected.setdefault(handle, []).extend(outputs.token_ids[start : start + count])
                start += count
            if open_handles and rng.random() < 0.05:
                handle = open_handles.pop()
                outputs.finished.append(finished(handle))
            outbox.put_outputs(outputs)
            if rng.random() < 0.3:
                for frame in await outbox.take():
                    outbox.progressed(frame)
        outbox.close()
        await outbox.take()
        assert tokens_by_handle(sent)[0] == expected
        assert tokens_by_handle(sent)[1] == set(range(10)) - open_handles


async def test_a_window_holds_outputs_back_until_some_are_acknowledged():
    outbox, sent, _ = make()
    outbox.window = 2
    for number in range(5):
        outbox.put_outputs(step(number, h1=[number]))
        if number < 2:
            await outbox.take()
    assert [outputs.step for outputs in sent] == [0, 1]
    outbox.put_frame(b"beside")
    assert await outbox.take() == [b"beside"]
    outbox.acknowledge(1)
    await outbox.take()
    assert [outputs.step for outputs in sent] == [0, 1, 4]
    assert list(zip(sent[2].handles, sent[2].num_tokens, strict=True)) == [(1, 3)]
    outbox.put_outputs(step(5, h1=[5]))
    outbox.close(b"last")
    assert (await outbox.take())[-1] == b"last"
    assert sent[-1].step == 5


async def test_a_frontend_that_acknowledges_nothing_is_overdue():
    outbox, _, clock = make(max_stall_seconds=10.0)
    outbox.window = 1
    outbox.put_outputs(step(0, h1=[0]))
    for frame in await outbox.take():
        outbox.progressed(frame)
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    clock.now += 100
    assert not outbox.overdue()
    outbox.put_outputs(step(1, h1=[1]))
    clock.now += 11
    assert "nothing was read for" in outbox.overdue()
    outbox.acknowledge(1)
    assert not outbox.overdue()
    assert await waiting
