"""The engine service: python -m engine_svc MODEL [options]."""

from engine_svc.config import EngineConfig
from engine_svc.process import EngineProcess, leave
from engine_svc.progress import loading_progress
from shared.config import command
from shared.log import setup_logging


def run(config: EngineConfig) -> None:
    """Serves until a signal. Raises StartupError when the engine cannot start."""
    setup_logging(config.log_level, json=config.json_logs)
    with loading_progress() as progress:
        code = EngineProcess(config).serve(progress)
    if code:
        leave(code)


main = command(EngineConfig, run, name="engine", help="Serves one replica of a model to frontends.")

if __name__ == "__main__":
    main()
