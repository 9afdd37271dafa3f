"""What a benchmark found: rows with our value, a peer's, and their ratio; as a table and as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure. With a peer, `ratio` above 1 means that ours is better."""

    measure: str
    ours: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None


def row(measure: str, ours: float, unit: str) -> Row:
    """A measure without a peer."""
    return Row(measure=measure, ours=ours, unit=unit)


def compared(measured: Row, peer: str, peer_value: float, *, lower_is_better: bool) -> Row:
    """The same measure beside a peer's value."""
    ours, theirs = (peer_value, measured.ours) if lower_is_better else (measured.ours, peer_value)
    return Row(
        measure=measured.measure,
        ours=measured.ours,
        unit=measured.unit,
        peer=peer,
        peer_value=peer_value,
        ratio=round(ours / theirs, 3) if theirs else None,
    )


def show(rows: list[Row]) -> None:
    """Prints one table."""
    table = Table("measure", "ours", "unit", "peer", "peer's value", "ratio (above 1: ours is better)")
    for entry in rows:
        numbers = [f"{entry.ours:g}", entry.unit, entry.peer]
        numbers += ["" if value is None else f"{value:g}" for value in (entry.peer_value, entry.ratio)]
        table.add_row(entry.measure, *numbers)
    Console(width=150).print(table)


def save(rows: list[Row], path: Path) -> None:
    """Writes the rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(entry) for entry in rows], indent=1) + "\n")
