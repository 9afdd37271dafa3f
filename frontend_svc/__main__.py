"""The frontend service: python -m frontend_svc MODEL --engine HOST:PORT [options]."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from frontend_svc.config import FrontendConfig
from shared.config import command
from shared.log import setup_logging

if TYPE_CHECKING:
    from frontend_svc.text.tokenizer import Tokenizer

logger = logging.getLogger("frontend_svc")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: FrontendConfig) -> None:
    """Serves until a signal. Raises StartupError when the frontend cannot start."""
    setup_logging(config.log_level, json=config.json_logs)
    # These load the tokenizer's and gRPC's libraries: after the flags are known to be good.
    from frontend_svc.text.tokenizer import Tokenizer  # noqa: PLC0415
    from frontend_svc.tokenizer_source import find_tokenizer  # noqa: PLC0415

    path = find_tokenizer(config.tokenizer_source, config.revision)
    tokenizer = Tokenizer.load(path, chat_template=config.chat_template)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, tokenizer))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop's loop where it is installed: faster by about a sixth."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(config: FrontendConfig, tokenizer: "Tokenizer") -> None:
    from frontend_svc.lifecycle import Frontend  # noqa: PLC0415 - loads gRPC

    frontend = Frontend(config, tokenizer)
    stopping = _shutdown_event()
    try:
        await frontend.start()
        _say(f"admin: frontend on {frontend.admin_address}")
        if frontend.metrics_port is not None:
            _say(f"metrics: frontend on {config.host}:{frontend.metrics_port}")
        if frontend.http_address is not None:
            _say(f"http: frontend on {frontend.http_address}")
        _say(f"ready: frontend on {frontend.address}")
        # What is alive now lives as long as the process; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        await stopping.wait()
        await frontend.drain()
    finally:
        await frontend.stop()


def _shutdown_event() -> asyncio.Event:
    """Set by the first signal; the second one has its default action."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def arrived() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        event.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, arrived)
    return event


def _say(line: str) -> None:
    """A line for scripts on standard output, and the same in the log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    logger.info("%s", line)


main = command(FrontendConfig, run, name="frontend", help="Serves clients: text in, streamed text out.")

if __name__ == "__main__":
    main()
