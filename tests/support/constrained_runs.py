"""Runs constrained requests through a whole core on the embedded model, all in few batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from engine_svc.executor.uniproc import ExecutorOptions, UniprocExecutor
from engine_svc.model.interface import Model
from shared.types import FinishReason, StructuredOutputSpec
from tests.support.drive import CoreLimits, make_core, make_request
from tests.support.grammars import Compilations, GrammarDriver, make_backend

LIMITS = CoreLimits(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=512, block_size=16, num_blocks=2049)


@dataclass(frozen=True)
class Wanted:
    """A question, and the constraint on its answer."""

    question: str
    spec: StructuredOutputSpec | None


@dataclass(frozen=True)
class Answer:
    text: str
    reason: FinishReason | None
    error: str


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def run_wanted(model: Model, folder: Path, wanted: Sequence[Wanted], *, max_tokens: int = 160, batches: int = 1):
    """Answers in order, at temperature 1, each with the seed of its index."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    executor = UniprocExecutor(model, ExecutorOptions(max_concurrent_batches=batches))
    backend = make_backend(folder, model.info.vocab_size, model.info.eos_token_ids)
    try:
        driver = GrammarDriver(make_core(executor, LIMITS, backend), Compilations(backend))
        got = [
            driver.add(
                make_request(
                    index,
                    tokenizer.encode(chat(one.question), add_special_tokens=False).ids,
                    eos_token_ids=model.info.eos_token_ids,
                    temperature=1.0,
                    seed=index,
                    max_tokens=max_tokens,
                    structured_output=one.spec,
                )
            )
            for index, one in enumerate(wanted)
        ]
        driver.run()
    finally:
        backend.shutdown()
        executor.shutdown()
    return [
        Answer(
            tokenizer.decode(one.token_ids, skip_special_tokens=True),
            one.reason,
            one.finished.error.message if one.finished.error else "",
        )
        for one in got
    ]
