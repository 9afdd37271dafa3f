"""Compiles grammars beside the core: in a few threads, each with a process of trials, behind a cache.

Every grammar is first tried in a process that may die of it, and compiled in this one only when that went well, so no
grammar can hang or kill the engine. Equal specs that are wanted at once are compiled once. Invariant: each call of
`compile` is answered once, unless it was cancelled before its answer.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine_svc.core.interfaces import CompiledGrammar
from engine_svc.grammar.compiler import Compiler, GrammarError, LibraryMatcher, load_compiler
from engine_svc.grammar.source import field_of
from engine_svc.grammar.trial_process import TrialProcess
from shared.errors import InternalError, InvalidRequestError, StartupError, TaktError
from shared.types import StructuredOutputSpec

logger = logging.getLogger(__name__)

# What a compiled grammar takes, measured and rounded up: a part of its own and one for each byte of its source.
_BYTES_EACH = 128 << 10
_BYTES_PER_SOURCE_BYTE = 16
# Answers that depend on more than the grammar.
_TRANSIENT = frozenset({"GRAMMAR_TIMEOUT", "NO_GRAMMARS", "DRAINING", "NO_TOKENIZER"})

Listener = Callable[[CompiledGrammar], None]
Outcome = LibraryMatcher | TaktError


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """Whose tokenizer, and how much a grammar may take."""

    # Tells the folder that holds tokenizer.json, when it is first needed. May raise StartupError.
    find_folder: Callable[[], Path]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compile_timeout: float = 10.0
    cache_bytes: int = 64 << 20
    max_compiling: int = 2


class GrammarCompiler:
    """Implements GrammarBackend. The tokenizer is loaded when the first grammar is wanted."""

    def __init__(self, options: GrammarOptions) -> None:
        self._options = options
        self._pool = ThreadPoolExecutor(options.max_compiling, thread_name_prefix="grammar")
        self._local = threading.local()
        self._trials: list[TrialProcess] = []
        self._compiler: Compiler | None = None
        self._folder: Path | None = None
        self._compiler_lock = threading.Lock()
        # Guards everything below.
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputSpec, tuple[Outcome, int]] = OrderedDict()
        self._cached_bytes = 0
        self._wanted: dict[StructuredOutputSpec, list[int]] = {}
        self._listener: Listener | None = None
        self._unheard: list[CompiledGrammar] = []
        self._closed = False

    # --- the core's side ------------------------------------------------------------------------------------------

    def compile(self, ticket: int, spec: StructuredOutputSpec) -> None:
        """Starts to compile, or answers from the cache."""
        with self._lock:
            cached = self._cache.get(spec)
            if cached is None:
                tickets = self._wanted.setdefault(spec, [])
                tickets.append(ticket)
                if len(tickets) == 1 and not self._closed:
                    self._pool.submit(self._run, spec)
                return
            self._cache.move_to_end(spec)
        self._answer(ticket, cached[0])

    def cancel(self, ticket: int) -> None:
        """Wants no answer any more; a grammar that nobody wants is not begun."""
        with self._lock:
            for tickets in self._wanted.values():
                if ticket in tickets:
                    tickets.remove(ticket)
                    return

    def register_listener(self, listener: Listener) -> None:
        """Calls `listener` with each answer, those from before at once."""
        with self._lock:
            self._listener = listener
            unheard, self._unheard = self._unheard, []
        for grammar in unheard:
            listener(grammar)

    def shutdown(self) -> None:
        """Ends processes and threads. Idempotent."""
        with self._lock:
            self._closed = True
            trials = list(self._trials)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for trial in trials:
            trial.kill()
        self._pool.shutdown(wait=True)
        for trial in trials:
            trial.close()

    @property
    def cached_bytes(self) -> int:
        """Bytes that the cache takes, as estimated."""
        return self._cached_bytes

    # --- the threads' side ----------------------------------------------------------------------------------------

    def _run(self, spec: StructuredOutputSpec) -> None:
        with self._lock:
            if not self._wanted.get(spec):
                self._wanted.pop(spec, None)
                return
        outcome, size = self._compile(spec)
        with self._lock:
            tickets = self._wanted.pop(spec, [])
            self._keep(spec, outcome, size)
        for ticket in tickets:
            self._answer(ticket, outcome)

    def _compile(self, spec: StructuredOutputSpec) -> tuple[Outcome, int]:
        """The outcome, and the bytes that it takes in the cache."""
        try:
            compiler = self._require_compiler()
            source = self._require_trial().compile(spec, field_of(spec), self._options.compile_timeout)
            size = _BYTES_EACH + _BYTES_PER_SOURCE_BYTE * len(source)
            return compiler.compile(source), size
        except TaktError as error:
            return error, len(spec.spec) + len(error.message)
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return InternalError(f"the grammar could not be compiled: {type(error).__name__}"), len(spec.spec)

    def _require_compiler(self) -> Compiler:
        options = self._options
        with self._compiler_lock:
            if self._compiler is None:
                try:
                    self._folder = options.find_folder().resolve()
                    self._compiler = load_compiler(self._folder, options.vocab_size, options.eos_token_ids)
                except (GrammarError, StartupError) as error:
                    message = f"structured_output must come with a model that has a tokenizer, got {error}"
                    raise InvalidRequestError(message, field="structured_output", reason="NO_TOKENIZER") from None
            return self._compiler

    def _require_trial(self) -> TrialProcess:
        trial: TrialProcess | None = getattr(self._local, "trial", None)
        if trial is None:
            options = self._options
            assert self._folder is not None
            ids = [str(token_id) for token_id in options.eos_token_ids]
            trial = self._local.trial = TrialProcess([str(self._folder), str(options.vocab_size), *ids])
            with self._lock:
                self._trials.append(trial)
                if self._closed:
                    trial.kill()
        return trial

    def _keep(self, spec: StructuredOutputSpec, outcome: Outcome, size: int) -> None:
        """Caches an outcome, and drops what was not used for longest."""
        if isinstance(outcome, TaktError) and outcome.reason in _TRANSIENT:
            return
        self._cache[spec] = (outcome, size)
        self._cached_bytes += size
        while self._cached_bytes > self._options.cache_bytes and self._cache:
            _, (_, freed) = self._cache.popitem(last=False)
            self._cached_bytes -= freed

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        if isinstance(outcome, TaktError):
            grammar = CompiledGrammar(ticket, None, outcome)
        else:
            grammar = CompiledGrammar(ticket, outcome.fork())
        with self._lock:
            listener = self._listener
            if listener is None:
                self._unheard.append(grammar)
                return
        listener(grammar)
