"""`python -m engine_svc.kernels`: builds the kernels, so that no start has to; with --all those of every processor."""

import platform
import sys

from engine_svc.kernels.build import INSTRUCTION_SETS, BuildError, built_library, usable_instruction_sets
from engine_svc.model.resolve import kernel_cache


def main() -> None:
    """Prints the libraries' paths. Without a compiler it says so and succeeds: the reference ops will run."""
    versions = usable_instruction_sets()[:1]
    if "--all" in sys.argv[1:] and platform.machine() == "x86_64":
        versions = list(INSTRUCTION_SETS)
    try:
        for version in versions:
            print(built_library(kernel_cache(), version))
    except BuildError as error:
        print(f"the native kernels are not built, the reference ops will run: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
