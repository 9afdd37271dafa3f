"""Several answers in one: outputs of all as they come, each waiting until the one before was taken."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from frontend_svc.request import RequestOutput

Outputs = AsyncGenerator[RequestOutput]


async def merged(answers: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs with the number of their answer. The first failure ends all of them, and is raised."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # One place: an answer that waits for it waits for the client.
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(1)
    tasks = [asyncio.ensure_future(_pump(index, outputs, queue)) for index, outputs in enumerate(answers)]
    try:
        going = len(tasks)
        while going:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                going -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, answer: Outputs, queue: "asyncio.Queue[tuple[int, RequestOutput] | BaseException | None]"
) -> None:
    try:
        async with aclosing(answer) as outputs:
            async for output in outputs:
                await queue.put((index, output))
    except Exception as error:  # noqa: BLE001 - raised where the answers are read
        await queue.put(error)
    else:
        await queue.put(None)
