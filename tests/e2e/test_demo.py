"""`make demo`'s own commands on the embedded model: the answer, and how long starting took."""

import json
import subprocess
import sys

import pytest

from takt_client.client import Client
from tests.support.stack import ROOT, serving

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."

pytestmark = pytest.mark.model


def takt(*arguments, timeout=600):
    return subprocess.run(
        [sys.executable, "-m", "takt_client.cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def embedded_model():
    """Fetches and converts the model unless that has been done; minutes the first time."""
    result = takt("model", "pull", "smollm2")
    assert result.returncode == 0, result.stderr


def test_the_demo_prints_the_answer():
    result = takt("demo", "smollm2")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ANSWER + "\n"
    assert "time to first token" in result.stderr
    assert "tokens/s" in result.stderr
    assert "finished by stop" in result.stderr


def test_what_make_runs_is_what_is_tested():
    plan = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "takt model pull smollm2\n" in plan
    assert plan.endswith("takt demo smollm2\n")


def test_starting_takes_seconds():
    with serving("smollm2") as stack, Client(stack.address) as client:
        output = client.chat(QUESTION, temperature=0.0, max_tokens=50).result()
        assert (output.text, output.finish_reason) == (ANSWER, "stop")
        seconds = {name: event["seconds"] for name, event in stack.services.items()}
        # Goals on two free cores: engine 10 s, frontend 3 s. The frontend's time includes waiting for its engine.
        print(json.dumps(seconds))
        assert seconds["engine-0"] < 60
