"""Closed-loop load on a Takt frontend: C clients each stream one request after another until N are done.

Prompts are random token ids from a fixed seed, every answer has exactly --out tokens, and the prompts are the same for
the same arguments, so that two servers do the same work. Prints one JSON line.

    python bench/grpc_load.py --target 127.0.0.1:50051 -c 8 -n 32 --inp 128 --out 128
"""

import argparse
import asyncio
import json
import random
import time

import grpc

from takt.v1 import inference_pb2, inference_pb2_grpc, types_pb2


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else float("nan")


class Result:
    """Times of one request, in seconds."""

    def __init__(self) -> None:
        self.tokens = 0
        self.messages = 0
        self.ttft = 0.0
        self.gaps: list[float] = []


async def generate(
    stub: inference_pb2_grpc.InferenceServiceStub, prompt: list[int], out: int, *, text: bool = True
) -> Result:
    """Streams one answer."""
    request = inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0, max_tokens=out, min_tokens=out, ignore_eos=True),
    )
    if not text:
        request.sampling.detokenize = False
    result, start, last = Result(), time.perf_counter(), 0.0
    async for response in stub.Generate(request):
        now = time.perf_counter()
        if response.token_ids:
            if result.tokens:
                result.gaps.append(now - last)
            else:
                result.ttft = now - start
            result.tokens += len(response.token_ids)
            result.messages += 1
            last = now
    if result.tokens != out:
        raise SystemExit(f"asked for {out} tokens, got {result.tokens}")
    return result


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Runs the load and returns its figures."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40000) for _ in range(arguments.inp)] for _ in range(arguments.n)]
    warm_up = [rng.randrange(100, 40000) for _ in range(arguments.inp)]
    results: list[Result] = []
    async with grpc.aio.insecure_channel(arguments.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await generate(stub, warm_up, 8)
        queue = iter(prompts)

        async def client() -> None:
            for prompt in queue:
                results.append(await generate(stub, prompt, arguments.out, text=arguments.text))

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(arguments.c)))
        wall = time.perf_counter() - start
    tokens = sum(result.tokens for result in results)
    ttft, gaps = [r.ttft for r in results], [gap for r in results for gap in r.gaps]
    return {
        "tag": arguments.tag,
        "c": arguments.c,
        "n": arguments.n,
        "in": arguments.inp,
        "out": arguments.out,
        "out_tok_s": round(tokens / wall, 1),
        "total_tok_s": round((tokens + arguments.inp * arguments.n) / wall, 1),
        "tokens_per_message": round(tokens / sum(r.messages for r in results), 2),
        "ttft_p50_ms": round(percentile(ttft, 50) * 1e3, 1),
        "ttft_p99_ms": round(percentile(ttft, 99) * 1e3, 1),
        "gap_p50_ms": round(percentile(gaps, 50) * 1e3, 2),
        "gap_p99_ms": round(percentile(gaps, 99) * 1e3, 2),
        "wall_s": round(wall, 1),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="address of the frontend")
    parser.add_argument("--tag", default="takt", help="name of the row")
    parser.add_argument("-c", type=int, default=8, help="clients")
    parser.add_argument("-n", type=int, default=32, help="requests")
    parser.add_argument("--inp", type=int, default=128, help="prompt tokens")
    parser.add_argument("--no-text", dest="text", action="store_false", help="token ids only")
    parser.add_argument("--out", type=int, default=128, help="output tokens")
    print(json.dumps(asyncio.run(run(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
