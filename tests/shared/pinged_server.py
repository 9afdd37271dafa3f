"""A server in a process of its own, to be stopped by a signal: prints its port, serves until it is killed."""

import asyncio

from shared.rpc.options import engine_server_options
from tests.support.echo import EchoServicer, echo_server


async def main() -> None:
    async with echo_server(EchoServicer(), engine_server_options()) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
