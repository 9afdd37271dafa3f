"""The choice of an op set and of the dtype it computes in, made once at start and logged."""

import logging
from dataclasses import dataclass

import torch

from engine_svc.kernels.choose import BuildError, Report, native_ops, unfit_reason, widens_well
from engine_svc.kernels.native_ops import NativeOps
from engine_svc.model.arch import DecoderConfig
from engine_svc.model.hardware import choose_dtype
from engine_svc.model.ops import Ops
from engine_svc.model.reference_ops import ReferenceOps
from engine_svc.model.resolve import kernel_cache
from shared.errors import StartupError

logger = logging.getLogger(__name__)

OP_SETS = ("auto", "native", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWanted:
    """What was asked for, by flags. `report` is told of a long build."""

    name: str
    dtype: str
    report: Report | None = None


def choose_ops(
    wanted: OpsWanted, config: DecoderConfig, checkpoint_dtype: str, device: torch.device
) -> tuple[Ops, torch.dtype]:
    """The op set and the dtype. "auto" takes the native ops on a CPU where they can run the model.

    Raises StartupError for an unknown name, and when "native" cannot be had.
    """
    name = wanted.name
    if name not in OP_SETS:
        raise StartupError(f"--ops must be one of {', '.join(OP_SETS)}, got {name!r}")
    native, reason = (None, "") if name == "reference" else _native(device, wanted.report)
    widens = native is not None and widens_well(native)
    chosen = choose_dtype(wanted.dtype, checkpoint_dtype, device, widens_bfloat16=widens)
    if native is not None:
        reason = unfit_reason(config, chosen)
        if not reason:
            return native, chosen
    if name == "native":
        raise StartupError(f"--ops native cannot be had: {reason}")
    if name == "auto" and device.type == "cpu":
        logger.warning("The reference ops run, which are slower: the native ones cannot, because %s.", reason)
    return ReferenceOps(), choose_dtype(wanted.dtype, checkpoint_dtype, device)


def _native(device: torch.device, report: Report | None) -> tuple[NativeOps | None, str]:
    """The native ops, or why there are none."""
    if device.type != "cpu":
        return None, f"they run on a CPU, not on {device}"
    try:
        return native_ops(kernel_cache(), report), ""
    except BuildError as error:
        return None, str(error)
