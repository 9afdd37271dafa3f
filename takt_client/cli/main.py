"""The takt command. Each subcommand is a thin function here; what it does lives in the modules beside."""

import os
import sys
import time
from typing import Annotated

import typer
from rich.live import Live

from takt_client.admin import DEFAULT_ADMIN_ADDRESS, AdminClient
from takt_client.cli import options, serve
from takt_client.cli.output import CommandError, answers, note, notes, print_answer, print_json
from takt_client.cli.tables import load_table, model_table
from takt_client.cli.talk import converse, show_answer
from takt_client.client import DEFAULT_ADDRESS, Client
from takt_client.errors import TaktClientError

PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
DEMO_QUESTION = "What is the capital of France? Answer in one sentence."
ModelArgument = Annotated[str, typer.Argument(help="A folder, a GGUF file, a Hub name, smollm2 or gemma3-270m.")]

app = typer.Typer(
    name="takt",
    help="Serves large language models over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Fetches models, lists served ones.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@app.command("serve")
def serve_command(  # noqa: PLR0917 - a flag is a parameter
    model: ModelArgument,
    engines: Annotated[int, typer.Option(min=1, help="Engines to start, each with the whole model.")] = 1,
    host: Annotated[str, typer.Option(help="Where the frontend listens.")] = serve.LOOPBACK,
    port: Annotated[int, typer.Option(help="The frontend's port; 0: a free one.")] = 50051,
    admin_port: Annotated[int, typer.Option(help="Its admin port, on loopback; 0: a free one.")] = 50052,
    http_port: Annotated[int, typer.Option(help="Its OpenAI-compatible API; 0: a free port, -1: none.")] = 8000,
    engine_port: Annotated[int, typer.Option(help="Port of the first engine; 0: free ones.")] = 50061,
    metrics_port: Annotated[int, typer.Option(help="The frontend's metrics; 0: a free port, -1: none.")] = 9100,
    engine_metrics_port: Annotated[int, typer.Option(help="The first engine's metrics, likewise.")] = 9101,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    executor: Annotated[str | None, typer.Option(help="uniproc, or fake for tests without a model.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV cache blocks.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Memory for the KV cache, in bytes.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output together.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests computed together.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name that clients use; may be repeated.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer folder; default: the model's own.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a Hub model.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="File of a chat template to use instead.")] = None,
    engine_arg: options.EngineArg = None,
    frontend_arg: options.FrontendArg = None,
    json: options.Json = False,
) -> None:
    """Serve MODEL on this machine: engines and a frontend, a process each, stopped together."""
    engine_flags = options.flags(
        dtype=dtype,
        device=device,
        executor=executor,
        num_blocks=num_blocks,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        revision=revision,
    )
    frontend_flags = options.flags(
        served_model_name=served_model_name, tokenizer=tokenizer, revision=revision, chat_template=chat_template
    )
    plan = serve.ServePlan(
        model=model,
        num_engines=engines,
        host=host,
        port=port,
        admin_port=admin_port,
        http_port=http_port,
        engine_port=engine_port,
        metrics_port=metrics_port,
        engine_metrics_port=engine_metrics_port,
        engine_arguments=(*engine_flags, *(engine_arg or ())),
        frontend_arguments=(*frontend_flags, *(frontend_arg or ())),
    )
    raise typer.Exit(serve.serve(plan, as_json=json))


@app.command("demo")
def demo_command(
    model: ModelArgument = "smollm2",
    question: Annotated[str, typer.Option("--question", "-q", help="What to ask.")] = DEMO_QUESTION,
    engine_arg: options.EngineArg = None,
    frontend_arg: options.FrontendArg = None,
    json: options.Json = False,
) -> None:
    """Serve MODEL on free ports, ask one question, show the answer and stop."""
    plan = serve.ServePlan(
        model=model,
        port=0,
        admin_port=0,
        http_port=-1,
        engine_port=0,
        metrics_port=-1,
        engine_metrics_port=-1,
        engine_arguments=tuple(engine_arg or ()),
        frontend_arguments=tuple(frontend_arg or ()),
    )
    serve.demo(plan, question, as_json=json)


@app.command("engine", context_settings=PASS_THROUGH)
def engine_command(context: typer.Context) -> None:
    """Run an engine alone; takes the arguments of python -m engine_svc."""
    _become("engine_svc", context.args)


@app.command("frontend", context_settings=PASS_THROUGH)
def frontend_command(context: typer.Context) -> None:
    """Run a frontend alone; takes the arguments of python -m frontend_svc."""
    _become("frontend_svc", context.args)


@app.command("generate")
def generate_command(  # noqa: PLR0917 - a flag is a parameter
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    address: options.Address = DEFAULT_ADDRESS,
    model: options.ModelName = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: options.N = None,
    logprobs: options.Logprobs = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    bad_words: options.BadWords = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    api_key: options.ApiKey = "",
    timeout: options.Timeout = None,
    json: options.Json = False,
) -> None:
    """Continue a text."""
    chosen = options.request_options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        n=n,
        logprobs=logprobs,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        bad_words=bad_words,
        structured_output=options.structured_output(json_schema=json_schema, regex=regex, choice=choice),
        timeout=timeout,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(address, api_key=api_key) as client, client.generate(text, **chosen) as stream:
        show_answer(stream, as_json=json)


@app.command("chat")
def chat_command(  # noqa: PLR0917 - a flag is a parameter
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this alone and end.")] = None,
    system: Annotated[str, typer.Option("--system", "-s", help="The system's message.")] = "",
    address: options.Address = DEFAULT_ADDRESS,
    model: options.ModelName = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    api_key: options.ApiKey = "",
    timeout: options.Timeout = None,
    json: options.Json = False,
) -> None:
    """Talk to a model in the terminal."""
    chosen = options.request_options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        structured_output=options.structured_output(json_schema=json_schema, regex=regex, choice=choice),
        timeout=timeout,
    )
    with Client(address, api_key=api_key) as client:
        if message is None:
            converse(client, system, chosen, as_json=json)
            return
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": message})
        with client.chat(messages, **chosen) as stream:
            show_answer(stream, as_json=json)


@app.command("tokenize")
def tokenize_command(
    text: Annotated[str, typer.Argument(help="The text; - reads standard input.")],
    address: options.Address = DEFAULT_ADDRESS,
    model: options.ModelName = "",
    special: Annotated[bool, typer.Option(help="Add the special tokens that the tokenizer adds.")] = True,
    api_key: options.ApiKey = "",
    json: options.Json = False,
) -> None:
    """Show the tokens of a text."""
    text = sys.stdin.read() if text == "-" else text
    with Client(address, api_key=api_key) as client:
        tokens = client.tokenize(text, model=model, add_special_tokens=special, return_tokens=True)
    if json:
        print_json(tokens)
        return
    for token_id, token in zip(tokens.token_ids, tokens.tokens, strict=True):
        print_answer(f"{token_id:>8}  {token}\n")
    note(f"{len(tokens.token_ids)} tokens")


@app.command("embed")
def embed_command(
    texts: Annotated[list[str], typer.Argument(help="The texts.")],
    address: options.Address = DEFAULT_ADDRESS,
    model: options.ModelName = "",
    pooling: Annotated[str, typer.Option(help="last or mean.")] = "last",
    normalize: Annotated[bool, typer.Option(help="Scale each vector to length 1.")] = True,
    api_key: options.ApiKey = "",
) -> None:
    """Turn texts into vectors, one JSON list a line."""
    with Client(address, api_key=api_key) as client:
        embeddings = client.embed(texts, model=model, pooling=pooling, normalize=normalize)
    for vector in embeddings.vectors:
        print_json(list(vector))
    note(f"{embeddings.usage.prompt_tokens} prompt tokens")


@app.command("load")
def load_command(
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    json: options.Json = False,
) -> None:
    """Show what the engines are doing."""
    with AdminClient(address) as client:
        load = client.get_load()
        if json:
            print_json(load)
        elif not watch:
            answers.print(load_table(load))
        if not watch:
            return
        with Live(load_table(load), console=answers, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                load = client.get_load()
                if json:
                    print_json(load)
                else:
                    live.update(load_table(load), refresh=True)


@model_app.command("pull", context_settings=PASS_THROUGH)
def pull_command(context: typer.Context) -> None:
    """Fetch and convert a model; takes the arguments of python -m engine_svc.model pull."""
    _become("engine_svc.model", ["pull", *context.args])


@model_app.command("list")
def model_list_command(
    address: options.Address = DEFAULT_ADDRESS, api_key: options.ApiKey = "", json: options.Json = False
) -> None:
    """List the models that a frontend serves."""
    with Client(address, api_key=api_key) as client:
        models = client.list_models()
    if json:
        for model in models:
            print_json(model)
        return
    answers.print(model_table(models))


def _become(module: str, arguments: list[str]) -> None:
    """Replaces this process by a module of ours."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell is wanted


def _hint(error: Exception) -> str:
    """What to do when nobody answers; a status without a reason is not one of a service of ours."""
    if isinstance(error, TaktClientError) and error.code == "UNAVAILABLE" and not error.reason:
        return " (does a frontend serve there? takt serve MODEL starts one, --address names another)"
    return ""


def main() -> None:
    """Entry point: every failure is one line and exit code 1."""
    try:
        app()
    except (TaktClientError, CommandError) as error:
        notes.print(f"takt: {error}{_hint(error)}", style="bold red", markup=False)
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:
        # A full disk behind standard output, for example.
        notes.print(f"takt: {error}", style="bold red", markup=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
