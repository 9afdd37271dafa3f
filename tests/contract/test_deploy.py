"""The images and the compose file, as far as they can be checked without a container engine."""

import re
import shutil
import subprocess

import pytest

from engine_svc.config import EngineConfig
from frontend_svc.config import FrontendConfig
from shared.config import flag_name
from tests.contract.sources import ROOT

DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
COMPOSE = shutil.which("docker-compose")
FLAGS = {
    "engine": {flag_name(name) for name in EngineConfig.__dataclass_fields__},
    "frontend": {flag_name(name) for name in FrontendConfig.__dataclass_fields__},
}


def instructions(path):
    """The instructions of a Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def make_targets(path):
    return [value.split()[1] for name, value in instructions(path) if name == "RUN" and value.startswith("make ")]


def test_there_are_images_for_both_services():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.engine", "Dockerfile.frontend"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_steps_are_targets_that_make_knows(path):
    makefile = (ROOT / "Makefile").read_text()
    targets = make_targets(path)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        result = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
    other_steps = [value for name, value in instructions(path) if name == "RUN" and not value.startswith("make ")]
    assert all(step.startswith(("apt-get ", "useradd ")) for step in other_steps)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_do_not_run_as_root(path):
    users = [value for name, value in instructions(path) if name == "USER"]
    assert users == ["takt"]


def test_the_frontend_image_has_no_torch():
    last_stage = DOCKERFILES[1].read_text().rpartition("\nFROM ")[2]
    assert "setup-engine" not in last_stage
    assert re.findall(r"^RUN make (\S+)", last_stage, re.MULTILINE) == ["setup-frontend"]
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup-frontend"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "torch==" in plan.stdout
    assert not re.search(r"install.*torch==", plan.stdout)


def test_both_images_share_the_first_stage():
    stages = [path.read_text().partition("FROM ")[2].partition("\nRUN useradd")[0] for path in DOCKERFILES]
    assert stages[1].startswith(stages[0].rstrip())


def service_flags(compose):
    """Flags given to each service of a compose file, read without a YAML library."""
    for name, block in re.findall(r"^  ((?:engine|frontend)[\w-]*):\n((?:    .*\n|\n)+)", compose, re.MULTILINE):
        command = block.partition("command:")[2].partition("ports:")[0]
        yield name, re.findall(r"--[a-z-]+", command)


def test_compose_uses_flags_that_exist():
    services = dict(service_flags((ROOT / "docker-compose.yml").read_text()))
    assert sorted(services) == ["engine-0", "engine-1", "frontend"]
    for name, flags in services.items():
        assert flags
        assert set(flags) <= FLAGS[name.partition("-")[0]], name


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
def test_the_compose_file_is_valid():
    result = subprocess.run([COMPOSE, "config"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    config = result.stdout
    assert config.count("no-new-privileges:true") == 3
    assert config.count("stop_grace_period: 140s") == 3
    assert config.count("healthcheck:") == 3
    assert config.count("init: true") == 3
