"""Becomes a module of ours that does not outlive its parent: python -m takt_client.cli.bound PARENT MODULE ARGUMENTS.

A parent that is killed cannot stop its children, so on Linux the kernel kills them when it is gone: by SIGKILL, for it
may send the signal once for each thread of the parent, and a second SIGTERM would not drain either. This is a program
of its own because no Python may run between fork and exec of a process with threads. Elsewhere than on Linux it only
becomes the module.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(module: str, arguments: tuple[str, ...]) -> list[str]:
    """The command line of a module that ends with this process, or with the thread that starts it."""
    return [sys.executable, "-m", "takt_client.cli.bound", str(os.getpid()), module, *arguments]


def main() -> None:
    """Asks for the signal, then becomes the module."""
    parent, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):
            # It was gone before the kernel was asked.
            raise SystemExit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
