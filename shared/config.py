"""Turns a frozen dataclass into a command line; the one place that reads the environment.

A configuration class lists its options as `option(...)` fields, so that a default, its limits and its help live once.
`command` makes a click command of it: flags `--like-this`, environment variables `TAKT_LIKE_THIS`, in that order of
precedence. The class validates itself in `__post_init__` by calling `check_limits`, and is never changed afterwards.
"""

import dataclasses
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from shared.errors import StartupError

ENVIRONMENT_PREFIX = "TAKT"

C = TypeVar("C")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    argument: bool = False,
) -> Any:
    """A dataclass field that is also a flag, or a positional argument."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """The flag of a field."""
    return "--" + field_name.replace("_", "-")


def check_limits(config: Any) -> None:
    """Raises StartupError naming the flag, the limit and the value of the first field outside its limits."""
    for field in dataclasses.fields(config):
        if "help" not in field.metadata:
            continue
        value = getattr(config, field.name)
        name = field.name.upper() if field.metadata["argument"] else flag_name(field.name)
        values = value if isinstance(value, tuple) else (value,)
        for item in values:
            _check_value(name, item, field.metadata)


def _check_value(name: str, value: Any, metadata: Any) -> None:
    if value is None:
        return
    minimum, maximum, choices = metadata["minimum"], metadata["maximum"], metadata["choices"]
    if minimum is not None and not value >= minimum:
        raise StartupError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and not value <= maximum:
        raise StartupError(f"{name} must be at most {maximum}, got {value}")
    if choices and value not in choices:
        raise StartupError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _element_type(annotation: Any) -> tuple[Any, bool]:
    """The scalar type of an annotation, and whether it may be given several times (tuple[T, ...])."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True
    if get_origin(annotation) in (Union, types.UnionType):
        return next(a for a in get_args(annotation) if a is not type(None)), False
    return annotation, False


def _parameter(field: "dataclasses.Field[Any]", annotation: Any) -> click.Parameter:
    scalar, multiple = _element_type(annotation)
    if field.metadata["argument"]:
        return click.Argument([field.name], type=scalar, required=field.default is dataclasses.MISSING)
    default = None if field.default is dataclasses.MISSING else field.default
    declaration = flag_name(field.name)
    if scalar is bool:
        declaration += f"/--no-{declaration[2:]}"
    kind = click.Choice(field.metadata["choices"]) if field.metadata["choices"] else scalar
    return click.Option(
        [field.name, declaration],
        type=kind,
        default=default,
        multiple=multiple,
        required=field.default is dataclasses.MISSING,
        show_default=True,
        help=field.metadata["help"],
        show_envvar=False,
    )


def command(config_class: type[C], run: Callable[[C], None], *, name: str, help: str) -> click.Command:
    """A command that builds the configuration and calls `run` with it.

    StartupError ends the process with one line on standard error and exit code 1.
    """
    hints = get_type_hints(config_class)
    fields = [f for f in dataclasses.fields(config_class) if "help" in f.metadata]  # type: ignore[arg-type]

    def callback(**values: Any) -> None:
        try:
            run(config_class(**values))
        except StartupError as error:
            click.echo(f"{name}: {error}", err=True)
            raise SystemExit(1) from None

    return click.Command(
        name,
        params=[_parameter(field, hints[field.name]) for field in fields],
        callback=callback,
        help=help,
        context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX, "help_option_names": ["-h", "--help"]},
    )


def environment(name: str, default: str = "") -> str:
    """An environment variable that is no option: a path of the platform's conventions, or of a library's."""
    return os.environ.get(name, default)
