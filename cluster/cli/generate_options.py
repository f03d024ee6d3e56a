"""The options of `baton generate`, apart from its body: what each is called, takes and says of itself."""

from __future__ import annotations

from typing import Annotated

import typer

Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Continue this text; - reads stdin.")
]
Chat = Annotated[
    str | None,
    typer.Option("--chat", "-c", metavar="TEXT", help="Answer this, with the chat template; - reads stdin."),
]
TokenIds = Annotated[str | None, typer.Option("--token-ids", metavar="1,2,3", help="Continue these tokens.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", metavar="N", help="At most N tokens, within the context. Default: 256."),
]
MinTokens = Annotated[int | None, typer.Option("--min-tokens", metavar="N", help="No end before N tokens. Default: 0.")]
Choices = Annotated[int | None, typer.Option("--choices", metavar="N", help="Write N answers, 1 to 16. Default: 1.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="T", help="Randomness; 0 is greedy. Default: 0."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest tokens. Default: all.")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="Draw from the likeliest that reach P. Default: 1.")
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Drop tokens less than P times as likely as the likeliest. Default: 0."),
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Taken off tokens written before. Default: 0.")
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="The same for each time it was written. Default: 0."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1: tokens of prompt and answer are less likely."),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=X", help="Add X to this token's logit; may be repeated."),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="The same S, the same tokens. Default: random.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End where TEXT would appear; may be repeated.")
]
StopTokenIds = Annotated[
    str | None, typer.Option("--stop-token-ids", metavar="1,2,3", help="End after one of these tokens.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")]
Logprobs = Annotated[
    int | None,
    typer.Option("--logprobs", metavar="K", help="Each token's log-probability, and the K likeliest; with --json."),
]
PromptLogprobs = Annotated[
    int | None, typer.Option("--prompt-logprobs", metavar="K", help="The same for the prompt's tokens; with --json.")
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Whose quota and share it counts for. Default: nobody's.")
]
Priority = Annotated[
    int | None,
    typer.Option("--priority", metavar="N", help="Higher goes first of its tenant's, -100 to 100. Default: 0."),
]
MaxLatencyMs = Annotated[
    int | None,
    typer.Option("--max-latency", metavar="MS", help="Refuse it if its first token would take longer. Default: never."),
]
TimeoutS = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", help="Give up after so long, up to 30 days. Default: never."),
]
