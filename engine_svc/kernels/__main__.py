"""`python -m engine_svc.kernels`: builds the kernels for this machine, so that no start has to."""

import sys

from engine_svc.kernels.build import BuildError, built_library, usable_instruction_sets
from engine_svc.model.resolve import kernel_cache


def main() -> None:
    """Prints the library's path. Without a compiler it says so and succeeds: the reference ops will run."""
    version = usable_instruction_sets()[0]
    try:
        print(built_library(kernel_cache(), version))
    except BuildError as error:
        print(f"the native kernels are not built, the reference ops will run: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
