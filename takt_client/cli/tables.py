"""Tables of engines and models for the terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from takt_client.types import Load, Model

_STATE_STYLES = {"ready": "green", "connecting": "yellow", "suspect": "yellow", "draining": "cyan", "refused": "red"}


def load_table(load: Load) -> Group:
    """What the engines of a frontend are doing, and what went wrong with those that are not ready."""
    state = "draining" if load.draining else "serving"
    table = Table(title=f"{load.num_requests} requests in flight, frontend {state}", title_justify="left")
    table.add_column("engine", no_wrap=True, min_width=max((len(engine.address) for engine in load.engines), default=0))
    table.add_column("state")
    for name in ("running", "waiting", "KV cache", "in flight", "steps", "last seen"):
        table.add_column(name, justify="right")
    for engine in load.engines:
        style = _STATE_STYLES.get(engine.state, "")
        table.add_row(
            engine.address,
            f"[{style}]{engine.state}[/]" if style else engine.state,
            str(engine.num_running),
            str(engine.num_waiting),
            f"{engine.kv_cache_usage:.1%}",
            str(engine.num_in_flight),
            str(engine.step_counter),
            f"{engine.last_seen_seconds:.1f} s",
        )
    troubled = [engine for engine in load.engines if engine.last_error and engine.state != "ready"]
    return Group(table, *(Text(f"{engine.address}: {engine.last_error}", style="yellow") for engine in troubled))


def model_table(models: Sequence[Model]) -> Table:
    """The served models."""
    table = Table()
    table.add_column("model")
    table.add_column("loaded from", overflow="fold")
    table.add_column("max length", justify="right")
    table.add_column("ready engines", justify="right")
    for model in models:
        table.add_row(model.name, model.root, str(model.max_model_len or "-"), str(model.num_ready_engines))
    return table
