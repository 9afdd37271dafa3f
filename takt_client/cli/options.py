"""Options that several subcommands share, declared once."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from takt_client.cli.output import CommandError
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
N = Annotated[int | None, typer.Option("--n", help="Number of outputs.", rich_help_panel=_SAMPLING)]
Logprobs = Annotated[
    int | None, typer.Option(help="Show so many likely tokens with each token.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Penalise tokens that occurred.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Penalise tokens by their count.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: penalise tokens of prompt and output.", rich_help_panel=_SAMPLING)
]
BadWords = Annotated[list[str] | None, typer.Option("--bad-word", help="A word that must not appear; may be repeated.")]
JsonSchema = Annotated[
    str | None, typer.Option(help="A JSON schema of the answer, or a file with one.", rich_help_panel=_SAMPLING)
]
Regex = Annotated[
    str | None, typer.Option(help="A regular expression that the answer matches.", rich_help_panel=_SAMPLING)
]
Choice = Annotated[
    list[str] | None, typer.Option(help="An allowed answer; may be repeated.", rich_help_panel=_SAMPLING)
]
ApiKey = Annotated[str, typer.Option(envvar="TAKT_API_KEY", help="Key for a frontend that asks for one.")]

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


def structured_output(*, json_schema: str | None, regex: str | None, choice: list[str] | None) -> dict[str, Any] | None:
    """The constraint of the flags that were given; None without one. Raises CommandError for several."""
    given: dict[str, Any] = {
        name: value
        for name, value in (("json_schema", json_schema), ("regex", regex), ("choice", choice))
        if value not in (None, [])
    }
    if len(given) > 1:
        raise CommandError("give only one of --json-schema, --regex and --choice")
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        try:
            given["json_schema"] = Path(json_schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommandError(f"--json-schema {json_schema} cannot be read: {error}") from None
    return given or None


def flags(**values: Any) -> tuple[str, ...]:
    """Command-line flags of the options that were given; a list gives its flag several times."""
    arguments: list[str] = []
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                arguments += [f"--{name.replace('_', '-')}", str(item)]
    return tuple(arguments)
