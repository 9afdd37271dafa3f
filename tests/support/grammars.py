"""Grammars for tests: a backend on a model's folder, and a driver that hands its answers to the core."""

from pathlib import Path
from queue import Empty, SimpleQueue

from engine_svc.core.engine_core import EngineCore
from engine_svc.core.interfaces import CompiledGrammar
from engine_svc.grammar.backend import GrammarCompiler, GrammarOptions
from shared.types import StructuredOutputKind, StructuredOutputSpec
from tests.support.drive import Clock, Driver

WAIT_SECONDS = 120.0


def make_backend(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...] = (2,), **options) -> GrammarCompiler:
    """A backend for the tokenizer in a folder."""
    return GrammarCompiler(
        GrammarOptions(find_folder=lambda: folder, vocab_size=vocab_size, eos_token_ids=eos_token_ids, **options)
    )


def spec(kind: str, text: str = "") -> StructuredOutputSpec:
    return StructuredOutputSpec(StructuredOutputKind[kind.upper()], text)


class Compilations:
    """Hears a backend, and waits for its answers."""

    def __init__(self, backend: GrammarCompiler) -> None:
        self.backend = backend
        self._answers: SimpleQueue[CompiledGrammar] = SimpleQueue()
        self._tickets = 0
        backend.register_listener(self._answers.put)

    def take(self, *, wait: bool = False) -> list[CompiledGrammar]:
        """Everything that was answered, at least one answer with `wait`."""
        taken = [self._answers.get(timeout=WAIT_SECONDS)] if wait else []
        while True:
            try:
                taken.append(self._answers.get_nowait())
            except Empty:
                return taken

    def compile(self, wanted: StructuredOutputSpec) -> CompiledGrammar:
        """Compiles one grammar while no other is wanted."""
        self._tickets += 1
        self.backend.compile(self._tickets, wanted)
        (answer,) = self.take(wait=True)
        assert answer.ticket == self._tickets
        return answer


class GrammarDriver(Driver):
    """A driver whose core gets the grammars of a backend before each step, waiting when nothing else runs."""

    def __init__(self, core: EngineCore, compilations: Compilations, clock: Clock | None = None) -> None:
        super().__init__(core, clock)
        self.compilations = compilations

    def step(self):
        load = self.core.load()
        idle = load.num_running == 0 and load.num_waiting == self.core.num_waiting_for_grammar > 0
        self.core.take_ready_grammars(self.compilations.take(wait=idle))
        return super().step()
