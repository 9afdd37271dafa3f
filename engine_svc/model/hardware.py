"""What the device can do: the choice of device and dtype, and the name of its instruction set."""

import logging
from pathlib import Path

import torch

from shared.errors import StartupError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# x86: AVX-512 BF16 and AMX; ARM: the BF16 extension.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def choose_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda". Raises StartupError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: this machine has no usable CUDA device, or torch was built without CUDA")
    if name not in ("cpu", "cuda"):
        raise StartupError(f"--device must be one of auto, cpu, cuda, got {name!r}")
    return torch.device(name)


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 in hardware; False where that cannot be told."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return bool(_BF16_FLAGS & set(flags.split()))


def choose_dtype(
    name: str, checkpoint_dtype: str, device: torch.device, *, widens_bfloat16: bool = False
) -> torch.dtype:
    """The dtype to compute in. "auto" is the checkpoint's own, unless the processor would only emulate it.

    With `widens_bfloat16` the op set is no slower in bfloat16 than in float32, whatever the processor has.

    Raises StartupError for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise StartupError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
        return DTYPES[name]
    dtype = DTYPES.get(checkpoint_dtype, torch.float32)
    if device.type != "cpu" or dtype is torch.float32:
        return dtype
    if dtype is torch.bfloat16 and (widens_bfloat16 or cpu_has_bfloat16()):
        return dtype
    logger.warning(
        "The checkpoint is in %s, which this processor has no instructions for: computing in float32.", dtype
    )
    return torch.float32


def instruction_set(device: torch.device) -> str:
    """What numbers may depend on: the vector extension of the processor, or the name of the GPU."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} sm_{major}{minor}"
    return str(torch.backends.cpu.get_cpu_capability()) + ("+bf16" if cpu_has_bfloat16() else "")
