"""Flags, environment and limits from a dataclass."""

from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from shared.config import check_limits, command, option
from shared.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: str = option(help="What to load.", argument=True)
    port: int = option(50, help="Where.", minimum=0, maximum=100)
    ratio: float | None = option(None, help="How much.", minimum=0)
    peer: tuple[str, ...] = option((), help="Whom; several.")
    fast: bool = option(True, help="Whether.")
    kind: str = option("a", help="Which.", choices=("a", "b"))

    def __post_init__(self):
        check_limits(self)
        if self.port == 13:
            raise StartupError("--port 13 is unlucky")


def run(*arguments, env=None):
    built = []
    result = CliRunner().invoke(command(Config, built.append, name="thing", help="Does it."), arguments, env=env)
    return result, built[0] if built else None


def test_defaults_flags_and_environment_in_order_of_precedence():
    assert run("m")[1] == Config(model="m")
    arguments = ["m", "--port", "7", "--peer", "x", "--peer", "y", "--no-fast", "--kind", "b", "--ratio", "0.5"]
    expected = Config(model="m", port=7, peer=("x", "y"), fast=False, kind="b", ratio=0.5)
    assert run(*arguments)[1] == expected
    assert run("m", env={"TAKT_PORT": "9"})[1].port == 9
    assert run("m", "--port", "8", env={"TAKT_PORT": "9"})[1].port == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--port", "101"], "thing: --port must be at most 100, got 101"),
        (["m", "--ratio", "-1"], "thing: --ratio must be at least 0, got -1.0"),
        (["m", "--port", "13"], "thing: --port 13 is unlucky"),
        (["m", "--ratio", "nan"], "thing: --ratio must be at least 0, got nan"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_1(arguments, message):
    result, config = run(*arguments)
    assert config is None
    assert result.exit_code == 1
    assert result.stderr.strip() == message


def test_help_names_every_flag():
    result, _ = run("--help")
    for flag in ("--port", "--ratio", "--peer", "--fast / --no-fast", "--kind", "MODEL"):
        assert flag in result.output
