"""`stack evaluate`: benchmarks of the Language Model Evaluation Harness."""

import asyncio
import json as json_format
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from stack_core.abi.errors import ConfigError
from stack_core.abi.installing import install_command

if TYPE_CHECKING:
    from stack_serve.evaluation.evaluate import Score

__all__ = ["evaluate"]


def evaluate(  # noqa: PLR0913, each parameter is an option of the command
    target: str,
    /,
    *,
    tasks: str,
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    shots: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    chat: Annotated[bool, Parameter(negative=())] = False,
    system: str | None = None,
    include: Path | None = None,
    output: Path | None = None,
    adapter: str | None = None,
    max_sequences: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    model: str | None = None,
    tokenizer: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Evaluate a language model on benchmarks: stack evaluate RUN|HF_DIR|gguf:FILE|URL --tasks arc_easy,gsm8k

    The tasks are those of EleutherAI's lm_eval, which downloads their data; `lm_eval ls tasks` lists them. Needs
    stack-serve[evaluate].

    Args:
      target: a model, which is loaded in this process, or the address of a server with OpenAI's API.
      tasks: names of tasks, separated by commas.
      limit: number of documents of each task (all).
      shots: number of examples in each prompt (each task's own).
      chat: render prompts by the model's chat template.
      system: system prompt.
      include: directory with YAML files of further tasks.
      output: directory for the results and each document's outputs, as JSON.
      adapter: run or PEFT directory of an adapter.
      max_sequences: number of sequences that run together, or of simultaneous requests to a server.
      model: name of the model on the server (the first one that it lists).
      tokenizer: directory of the tokenizer with which a server's texts are scored; needs transformers.
      json: print the scores as JSON.
    """
    names = tuple(name for name in (name.strip() for name in tasks.split(",")) if name)
    if not names:
        raise ConfigError("--tasks names no task. Separate the names by commas.")
    is_server = target.startswith(("http://", "https://"))
    if is_server:
        _refuse_set("a server, which has its own model", adapter=adapter)
        if chat:
            _refuse_set("answers to chats, which are not scored", tokenizer=tokenizer)
    else:
        _refuse_set("a model in this process", model=model, tokenizer=tokenizer)
    from stack_serve.evaluation.evaluate import EvaluationSettings, evaluate_model, evaluate_server

    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Benchmarks are those of lm_eval: {error}. Install it: {install_command('stack-serve[evaluate]')}"
        ) from error
    if tokenizer is not None and find_spec("transformers") is None:
        raise ConfigError("The harness reads --tokenizer by transformers. Install it: pip install transformers")
    settings = EvaluationSettings(
        tasks=names, limit=limit, shots=shots, chat=chat, system=system, include=include, output=output
    )
    if is_server:
        url, name = asyncio.run(_served(target, model))
        concurrency = {} if max_sequences is None else {"concurrency": max_sequences}
        scores = evaluate_server(url, name, settings, tokenizer=tokenizer, **concurrency)
    else:
        engine: dict[str, Any] = {} if max_sequences is None else {"max_sequences": max_sequences}
        scores = evaluate_model(target, settings, adapter=adapter, **engine)
    print(json_format.dumps([asdict(score) for score in scores]) if json else _table(scores))


def _refuse_set(target: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} has no effect on {target}. Leave it out.")


async def _served(target: str, model: str | None) -> tuple[str, str]:
    """Returns the address of a server's API and the name of its model; raises RequestFailed if it has none."""
    from stack_serve.client.endpoint import Endpoint

    async with Endpoint(target, api_key=os.environ.get("OPENAI_API_KEY")) as endpoint:
        names = await endpoint.models()
    if (model is not None and model not in names) or not names:
        raise ConfigError(f"{target} has {', '.join(names) or 'no model'}. Name one by --model.")
    return endpoint.address, model or names[0]


def _table(scores: Sequence["Score"]) -> str:
    rows = [("task", "metric", "value", "std. error", "documents")]
    for score in scores:
        error = "" if score.error is None else f"{score.error:.4f}"
        documents = "" if score.documents is None else f"{score.documents:,}"
        rows.append((score.task, score.metric, f"{score.value:.4f}", error, documents))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]).rstrip() for row in rows
    ]
    return "\n".join(lines)
