"""Outputs are passed on at once while the loop keeps up, and meet in one message when it does not."""

import asyncio
import time

from frontend_svc.collector import News, OutputCollector
from frontend_svc.pacing import WakePacer


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_idle_loop_wakes_at_once():
    pacer = WakePacer()
    collector = OutputCollector(10, lambda: None, News(pacer))
    for token_id in range(3):
        taking = asyncio.create_task(collector.take())
        await asyncio.sleep(0)
        collector.on_token(token_id)
        assert (await taking).token_ids == [token_id]
        await turns(6)


async def test_a_loop_that_is_behind_merges_and_loses_nothing():
    pacer = WakePacer()
    collectors = [OutputCollector(1000, lambda: None, News(pacer)) for _ in range(4)]
    taken = [[] for _ in collectors]

    async def read(index):
        while sum(taken[index]) < 50:
            token_ids = (await collectors[index].take()).token_ids
            taken[index].append(len(token_ids))
            # What building and writing a message would cost.
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass

    readers = [asyncio.create_task(read(index)) for index in range(4)]
    await asyncio.sleep(0)
    for token_id in range(50):
        for collector in collectors:
            collector.on_token(token_id)
        await asyncio.sleep(0)
    await asyncio.gather(*readers)
    for counts in taken:
        assert sum(counts) == 50
        assert len(counts) < 25


async def test_a_reader_that_is_gone_costs_nothing():
    pacer = WakePacer()
    news = News(pacer)
    waiting = asyncio.create_task(news.wait())
    await asyncio.sleep(0)
    news.announce()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    other = News(pacer)
    waiting = asyncio.create_task(other.wait())
    await asyncio.sleep(0)
    other.announce()
    await waiting
