"""Shows what a long start is doing: a bar on a terminal, lines in the log elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

# Lines in the log come at these shares of a piece of work.
LOGGED_SHARES = 4


@contextmanager
def loading_progress() -> Iterator[Callable[[str, float], None]]:
    """Yields a function that is told what is being done, and the share done in [0, 1]."""
    if not sys.stderr.isatty():
        yield _LoggedProgress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def show(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=share)
            if all(task.finished for task in bars.tasks):
                bars.stop()

        yield show


class _LoggedProgress:
    def __init__(self) -> None:
        self._logged: dict[str, int] = {}

    def __call__(self, what: str, share: float) -> None:
        part = int(share * LOGGED_SHARES)
        if part > self._logged.get(what, -1):
            self._logged[what] = part
            logger.info("%s: %d%%", what, 100 * part // LOGGED_SHARES)
