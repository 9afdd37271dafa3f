"""Writes what transformers answers greedily in float32: the facts of tests/data/*_greedy*.jsonl.

    python -m tests.support.greedy_cases MODEL_FOLDER PROMPTS.json OUT.jsonl --max-new-tokens 32

PROMPTS.json is a list of texts, or of lists of token ids. Each line holds `prompt_token_ids`, `output_token_ids`, the
smallest difference between the two best logits on the way (`smallest_gap`), and the first output index where it is
under 0.002 (`first_close_step`, null when there is none): from there on rounding decides.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

CLOSE_GAP = 0.002


def greedy_case(model: Any, prompt: list[int], max_new_tokens: int, eos: tuple[int, ...]) -> dict[str, Any]:
    """The case of one prompt; `model` is a float32 model of transformers."""
    import torch  # noqa: PLC0415 - heavy

    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    output = result.sequences[0, len(prompt) :].tolist()
    best = torch.stack(result.logits)[:, 0].double().topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    close = [index for index, gap in enumerate(gaps) if gap < CLOSE_GAP]
    return {
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "smallest_gap": round(min(gaps), 5),
        "first_close_step": close[0] if close else None,
    }


def comparable(case: dict[str, Any]) -> list[int]:
    """The output tokens of a case that rounding does not decide."""
    close = case["first_close_step"]
    return case["output_token_ids"] if close is None else case["output_token_ids"][:close]


def shortened(cases: Sequence[dict[str, Any]], num_tokens: int) -> list[dict[str, Any]]:
    """The cases as if they had asked for fewer tokens."""
    return [case | {"output_token_ids": case["output_token_ids"][:num_tokens]} for case in cases]


def load_cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@click.command()
@click.argument("folder", type=Path)
@click.argument("prompts", type=Path)
@click.argument("out", type=Path)
@click.option("--max-new-tokens", default=32)
def main(folder: Path, prompts: Path, out: Path, max_new_tokens: int) -> None:
    import torch  # noqa: PLC0415 - heavy
    from tokenizers import Tokenizer  # noqa: PLC0415 - heavy
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with out.open("w") as file:
        for prompt in json.loads(prompts.read_text()):
            ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
            case = greedy_case(model, ids, max_new_tokens, tuple(eos if isinstance(eos, list) else [eos]))
            text = {"text": prompt} if isinstance(prompt, str) else {}
            file.write(json.dumps(text | case | {"output_text": tokenizer.decode(case["output_token_ids"])}) + "\n")


if __name__ == "__main__":
    main()
