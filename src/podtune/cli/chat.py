"""`podtune chat`: talk to a finished run, or to any model."""

from typing import Annotated

import typer


def chat(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's output folder, a model folder, an adapter folder, a .gguf file or a Hub id.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and leave.")] = None,
    raw: Annotated[
        bool | None,
        typer.Option(
            "--raw/--chat",
            help="Go on from each text as it stands, or use the chat template. Otherwise the form that the run was "
            "trained on; of any other model the template, where it has one.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; higher is more varied.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the tokens that make up this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 512,
) -> None:
    """Talk to a model: one prompt, lines piped in, or a conversation on the terminal.

    A run that was trained on plain text, or on prompts and completions, continues what it is given.
    """
    from podtune.serve.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

    from podtune.workflow.talking import talk_to

    talk_to(source, prompt=prompt, system=system, raw=raw, sampling=sampling, max_new_tokens=max_new_tokens)
