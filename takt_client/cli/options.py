"""Options that several subcommands share, declared once."""

from typing import Annotated, Any, cast

import typer

from takt_client.types import GenerateOptions

_SAMPLING = "Sampling"

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Address = Annotated[str, typer.Option("--address", "-a", help="The frontend's HOST:PORT.")]
AdminAddress = Annotated[str, typer.Option("--address", "-a", help="The frontend's admin HOST:PORT.")]
ModelName = Annotated[str, typer.Option("--model", help="A served model's name; default: the one that is served.")]

MaxTokens = Annotated[int | None, typer.Option(help="Most output tokens.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="Keep the K most likely tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float | None, typer.Option(help="Drop unlikely tokens.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Seed of the random draws.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="A string that ends the answer; may be repeated.", rich_help_panel=_SAMPLING)
]
Timeout = Annotated[float | None, typer.Option(help="Seconds until the request is given up.")]

EngineArg = Annotated[
    list[str] | None,
    typer.Option("--engine-arg", help="One more argument for every engine, as --engine-arg=--block-size=32."),
]
FrontendArg = Annotated[
    list[str] | None,
    typer.Option("--frontend-arg", help="One more argument for the frontend, as --frontend-arg=--log-level=debug."),
]


def request_options(**values: Any) -> GenerateOptions:
    """The options that were given."""
    return cast("GenerateOptions", {name: value for name, value in values.items() if value not in (None, "", [])})


def flags(**values: Any) -> tuple[str, ...]:
    """Command-line flags of the options that were given; a list gives its flag several times."""
    arguments: list[str] = []
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                arguments += [f"--{name.replace('_', '-')}", str(item)]
    return tuple(arguments)
