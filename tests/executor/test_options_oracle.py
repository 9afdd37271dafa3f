"""Options on a real model in float32 against transformers: its own processors, and log_softmax of its logits.

Log-probabilities are compared under every kind of schedule; which one it is must make no difference.
"""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_svc.executor.uniproc import ExecutorOptions, UniprocExecutor  # noqa: E402 - after importorskip
from engine_svc.model.load import LoadOptions, load_model  # noqa: E402
from engine_svc.model.resolve import resolve_model  # noqa: E402
from shared.types import FinishReason  # noqa: E402
from tests.support.drive import CoreLimits, Driver, make_core, make_request  # noqa: E402
from tests.support.greedy_cases import CLOSE_GAP, load_cases  # noqa: E402
from tests.support.options_oracle import ranked  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

DATA = Path(__file__).parents[1] / "data"
EOS = 2
TOLERANCE = 5e-4
ALL_CASES = load_cases(DATA / "smollm2_greedy_bf16_weights.jsonl")
SHORT_CASES = [case for case in ALL_CASES if 8 < len(case["prompt_token_ids"]) < 90]
CASES = [SHORT_CASES[index] for index in (0, 3, 10, 11)]
PROMPTS = [case["prompt_token_ids"] for case in CASES]
WIDE = CoreLimits(max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=256, block_size=16, num_blocks=200)


@pytest.fixture(scope="module")
def smollm2():
    return load_model(LoadOptions(model="smollm2", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def reference():
    folder = resolve_model("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(model, requests, limits, *, batches=1, mode="raw_logprobs", rounds=1):
    """What each request got, in the last round; and the driver."""
    executor = UniprocExecutor(model, ExecutorOptions(max_concurrent_batches=batches, logprobs_mode=mode))
    try:
        driver = Driver(make_core(executor, limits))
        got = []
        for client in range(1, rounds + 1):
            got = [driver.add(request, client) for request in requests]
            driver.run()
        return got, driver
    finally:
        executor.shutdown()


_LOGITS = {}


@torch.inference_mode()
def all_logits(reference, token_ids):
    """Kept: the same sequences come under every schedule."""
    key = tuple(token_ids)
    if key not in _LOGITS:
        _LOGITS[key] = reference(input_ids=torch.tensor([token_ids])).logits[0]
    return _LOGITS[key]


def own_words(case, count):
    """Pieces of the greedy output: what must not be said again."""
    output = case["output_token_ids"]
    words = (tuple(output[2 * index : 2 * index + (1, 2, 3, 2)[index]]) for index in range(count))
    return tuple(word for word in words if word)


OPTIONS = {
    "repetition": lambda case: {"repetition_penalty": 1.4},
    "bad words": lambda case: {"bad_words": own_words(case, 4)},
    "min_tokens": lambda case: {"min_tokens": 8, "stop_token_ids": tuple(case["output_token_ids"][:3])},
    "bias": lambda case: {"logit_bias": tuple((token, -4.0) for token in dict.fromkeys(case["output_token_ids"]))},
    "all": lambda case: {
        "repetition_penalty": 1.2,
        "bad_words": own_words(case, 3),
        "min_tokens": 5,
        "logit_bias": ((case["output_token_ids"][0], 3.0),),
    },
}


def processors(options, prompt_length):
    """Transformers' processors of the same meaning, in the order of ours; they see prompt and output."""
    stops = [*options.get("stop_token_ids", ()), EOS]
    bad_words = [list(word) for word in options.get("bad_words", ())]
    bias = [[[token], value] for token, value in options.get("logit_bias", ())]
    made = []
    if bad_words:
        made.append((transformers.NoBadWordsLogitsProcessor(bad_words, eos_token_id=[]), prompt_length))
    if "min_tokens" in options:
        length = options["min_tokens"]
        made.append((transformers.MinNewTokensLengthLogitsProcessor(prompt_length, length, stops, device="cpu"), 0))
    if bias:
        made.append((transformers.SequenceBiasLogitsProcessor(bias), prompt_length))
    if "repetition_penalty" in options:
        made.append((transformers.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]), 0))
    return made


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_equals_transformers_processors(smollm2, reference, name):
    options = [OPTIONS[name](case) for case in CASES]
    requests = [
        make_request(
            index, prompt, temperature=0.0, max_tokens=14, ignore_eos=True, eos_token_ids=(EOS,), **options[index]
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    got, _ = run(smollm2, requests, WIDE)
    compared = 0
    for index, prompt in enumerate(PROMPTS):
        tokens = got[index].token_ids
        logits = all_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
        for step, scores in enumerate(logits):
            seen = torch.tensor([[*prompt, *tokens[:step]]])
            row = scores[None].clone()
            for processor, start in processors(options[index], len(prompt)):
                row = processor(seen[:, start:], row)
            best = row[0].topk(2)
            if float(best.values[0] - best.values[1]) > CLOSE_GAP:
                assert tokens[step] == int(best.indices[0]), (name, index, step)
                compared += 1
        assert tokens != CASES[index]["output_token_ids"][: len(tokens)] or name == "min_tokens"
    assert compared > 40


LOGPROB_RUNS = {
    "together": {"limits": WIDE},
    "alone": {
        "limits": CoreLimits(
            max_num_seqs=1, max_num_batched_tokens=256, max_model_len=256, block_size=16, num_blocks=40
        )
    },
    "chunks of 16": {
        "limits": CoreLimits(
            max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256, block_size=16, num_blocks=99
        ),
        "batches": 3,
    },
    "preempted": {
        "limits": CoreLimits(max_num_seqs=8, max_num_batched_tokens=48, max_model_len=120, block_size=4, num_blocks=32)
    },
    "preempted with batches in flight": {
        "limits": CoreLimits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=120, block_size=4, num_blocks=32),
        "batches": 3,
    },
    "prefix hits": {
        "limits": CoreLimits(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=256, block_size=4, num_blocks=400
        ),
        "rounds": 2,
    },
}


@pytest.mark.parametrize("name", LOGPROB_RUNS)
def test_logprobs_equal_log_softmax_of_transformers(smollm2, reference, name):
    requests = [
        make_request(
            index,
            prompt,
            temperature=0.8 if index % 2 else 0.0,
            seed=index,
            max_tokens=10,
            eos_token_ids=(EOS,),
            logprobs=[5, 0, 20, 3][index],
            # Half of the requests want the prompt too, the others may hit the prefix cache.
            prompt_logprobs=[0, None, 7, None][index],
            presence_penalty=1.0 if index == 3 else 0.0,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    got, driver = run(smollm2, requests, **LOGPROB_RUNS[name])
    assert (driver.num_preempted > 0) == name.startswith("preempted")
    assert (driver.prefix_hits > 0) or name != "prefix hits"
    for request, collected in zip(requests, got, strict=True):
        prompt, output = list(request.prompt_token_ids), collected.token_ids
        logits = all_logits(reference, [*prompt, *output]).numpy()
        expected = torch.from_numpy(logits).log_softmax(dim=1).numpy()
        check_entries(
            collected.logprobs,
            output,
            logits[len(prompt) - 1 :],
            expected[len(prompt) - 1 :],
            request.sampling.logprobs,
        )
        if request.sampling.prompt_logprobs is None:
            assert not collected.prompt_logprobs
        else:
            check_entries(collected.prompt_logprobs, prompt[1:], logits, expected, request.sampling.prompt_logprobs)
            if name != "preempted":
                assert collected.first_scheduled.num_cached_tokens == 0


def check_entries(entries, tokens, logits, expected, count):
    assert len(entries) == len(tokens)
    for position, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        assert entry.token_ids[0] == token
        assert len(entry.token_ids) == 1 + count
        np.testing.assert_allclose(entry.logprobs, expected[position, entry.token_ids], atol=TOLERANCE)
        if position % 5 == 0:
            # Where rounding cannot exchange two candidates, they are the same, in the same order.
            candidates, rank = ranked(logits[position], token, count + 1)
            gaps = np.diff(logits[position, candidates[1:]])
            if (np.abs(gaps) > CLOSE_GAP).all():
                assert entry.token_ids == candidates[: 1 + count]
            near = int((np.abs(logits[position] - logits[position, token]) < CLOSE_GAP).sum())
            assert abs(entry.rank - rank) <= near


def test_chosen_tokens_and_the_whole_vocabulary(smollm2, reference):
    prompt = PROMPTS[0]
    requests = [
        make_request(0, prompt, temperature=0.0, max_tokens=3, logprob_token_ids=(5, 900, 40000)),
        make_request(1, prompt[:4], temperature=0.0, max_tokens=2, logprobs=-1, prompt_logprobs=-1),
    ]
    limits = CoreLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=120, block_size=4, num_blocks=80, max_logprobs=-1
    )
    (chosen, whole), _ = run(smollm2, requests, limits)
    for collected, tokens in ((chosen, prompt), (whole, prompt[:4])):
        expected = all_logits(reference, [*tokens, *collected.token_ids]).log_softmax(dim=1).numpy()[len(tokens) - 1 :]
        for entry, row in zip(collected.logprobs, expected, strict=False):
            np.testing.assert_allclose(entry.logprobs, row[entry.token_ids], atol=TOLERANCE)
    assert all(entry.token_ids[1:] == [5, 900, 40000] for entry in chosen.logprobs)
    assert all(len(set(entry.token_ids[1:])) == smollm2.info.vocab_size for entry in whole.logprobs)
    assert len(whole.prompt_logprobs) == 3


def test_processed_logprobs(smollm2):
    request = make_request(0, PROMPTS[0], temperature=0.7, top_k=4, seed=3, max_tokens=6, logprobs=5)
    (collected,), _ = run(smollm2, [request], WIDE, mode="processed_logprobs")
    for entry in collected.logprobs:
        assert np.isclose(np.exp(entry.logprobs[1:5]).sum(), 1, atol=1e-5)
        assert entry.logprobs[5] == -np.inf
        assert entry.token_ids[0] in entry.token_ids[1:5]


POOLING_RUNS = {name: LOGPROB_RUNS[name] for name in ("together", "chunks of 16", "prefix hits")}


@pytest.mark.parametrize("name", POOLING_RUNS)
def test_vectors_equal_hidden_states_of_transformers(smollm2, reference, name):
    kinds = [("last", False), ("mean", False), ("last", True), ("mean", True)]
    requests = [make_request(index, prompt, pooling=kinds[index]) for index, prompt in enumerate(PROMPTS)]
    # Generation beside them is not disturbed.
    generating = [
        make_request(10 + index, prompt, temperature=0.0, max_tokens=5) for index, prompt in enumerate(PROMPTS)
    ]
    got, driver = run(smollm2, requests + generating, **POOLING_RUNS[name])
    for prompt, (pooling, normalize), collected in zip(PROMPTS, kinds, got, strict=False):
        with torch.inference_mode():
            states = reference.model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double()
        expected = states[-1] if pooling == "last" else states.mean(dim=0)
        expected = expected / expected.norm() if normalize else expected
        assert collected.reason is FinishReason.STOP
        assert not collected.token_ids
        scale = float(expected.abs().max())
        np.testing.assert_allclose(collected.finished.embedding, expected.numpy(), atol=2e-4 * scale)
    for case, collected in zip(CASES, got[len(PROMPTS) :], strict=True):
        assert collected.token_ids == case["output_token_ids"][:5]
    if name == "prefix hits":
        hits = [driver.by_key[2, index].first_scheduled.num_cached_tokens for index in range(len(PROMPTS))]
        assert any(hits[0::2]), "those of the last token may hit"
        assert not any(hits[1::2]), "a mean needs every token"
