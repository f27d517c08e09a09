"""`stack data`: prepared sets of tokenized documents."""

import dataclasses
import json as json_format
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stack_core.abi.config import apply_overrides, load_yaml
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.local_paths import local_path
from stack_core.cli import overrides_from

if TYPE_CHECKING:
    from stack_train.data.prepared.prepare import Progress
    from stack_train.data.settings import TextSettings
    from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["prepare_data", "verify_data"]

_SHARD_TOKENS = 1 << 26


def prepare_data(
    source: str,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    output: Path,
    tokenizer: Path | None = None,
    text_field: str | None = None,
    workers: int | None = None,
    shard_tokens: int = _SHARD_TOKENS,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Tokenize documents once: stack data prepare run.yaml --output sets/web

    A run trains on the set with `data.source: prepared:sets/web`, in the same order as on the documents. A killed
    command continues when it is run again. Files of 64 MiB are tokenized in parallel; smaller ones are grouped.

    Args:
      source: YAML file of a run, or the address of documents, such as "jsonl:web/*.jsonl".
      overrides: any number of --section.key VALUE for the run.
      output: directory of the set; for a run with data.mix, each source is a set in a folder of its name.
      tokenizer: directory of the tokenizer; required unless a run names or trains one.
      text_field: key of a record's text, for the address of documents.
      workers: number of processes; by default one for each CPU.
      shard_tokens: number of tokens after which a shard ends.
      json: print the counts as JSON on standard output.
    """
    from stack_train.data.prepared.prepare import prepare

    if shard_tokens < 1 or (workers is not None and workers < 1):
        raise ConfigError("--workers and --shard-tokens must be at least 1.")
    configs, made = _opened(source, overrides, tokenizer, text_field)
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    results = {}
    for name, config in configs.items():
        directory = output / name if name else output
        began_s = time.perf_counter()
        found = prepare(
            config,
            made,
            directory,
            workers=workers,
            shard_tokens=shard_tokens,
            report=_report,
        )
        results[str(directory)] = {
            "documents": found.documents,
            "tokens": found.tokens,
            "shards": len(found.shards),
            "seconds": round(time.perf_counter() - began_s, 3),
        }
        if not json:
            print(
                f"{directory}: {found.documents:,} documents, {found.tokens:,} tokens, {len(found.shards)} shards. "
                f"Train on it with data.source: prepared:{directory}"
            )
    if json:
        print(json_format.dumps(results))


def verify_data(directory: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Check the files of a prepared set against their digests: stack data verify sets/web

    Args:
      directory: directory of the set.
      json: print the result of each file as JSON on standard output.
    """
    from stack_train.data.prepared.manifest import open_corpus, verify

    open_corpus(directory)  # names missing files and other sizes
    files = dict(verify(directory))
    if json:
        print(json_format.dumps(files))
    if damaged := [name for name, is_intact in files.items() if not is_intact]:
        raise DataError(
            f"{len(damaged)} of {len(files)} files of {str(directory)!r} differ from their digests: "
            f"{', '.join(damaged)}. Restore them, or prepare the set again in another directory."
        )
    if not json:
        print(f"{directory}: {len(files)} files are intact.")


def _opened(
    source: str, overrides: tuple[str, ...], tokenizer: Path | None, text_field: str | None
) -> tuple[dict[str, "TextSettings"], "HuggingFaceTokenizer"]:
    """Returns the settings of each set by its name, "" for the set of a single source, and their tokenizer."""
    if not source.endswith((".yaml", ".yml")):
        return _of_address(source, overrides, tokenizer, text_field)
    if text_field is not None:
        raise ConfigError("--text-field is for an address of documents; a run has --data.text_field.")
    given = [] if tokenizer is None else [f"data.tokenizer={tokenizer}"]
    return _of_run(apply_overrides(load_yaml(local_path(source)), [*overrides_from(overrides), *given]))


def _of_address(
    source: str, overrides: tuple[str, ...], tokenizer: Path | None, text_field: str | None
) -> tuple[dict[str, "TextSettings"], "HuggingFaceTokenizer"]:
    from stack_train.data.settings import TextSettings
    from stack_train.data.tokenizer import HuggingFaceTokenizer

    if overrides:
        raise ConfigError(f"{overrides[0]} overrides a run's config, but {source!r} is an address of documents.")
    if tokenizer is None:
        raise ConfigError(
            f"{source!r} is an address of documents, so a tokenizer is required: give --tokenizer DIR, or the YAML "
            "file of a run."
        )
    return {"": TextSettings(source=source, text_field=text_field)}, HuggingFaceTokenizer.load(tokenizer)


def _of_run(mapping: dict[str, Any]) -> tuple[dict[str, "TextSettings"], "HuggingFaceTokenizer"]:
    from stack_core.abi.user_cache import user_cache_dir
    from stack_train.data.kinds.text import TextData, check_vocabulary
    from stack_train.data.pipeline import make_tokenizer
    from stack_train.data.source import open_source
    from stack_train.run.resolve import parse_run, resolve

    run = resolve(parse_run(mapping)).config
    data, model = run.data, run.model
    if not isinstance(data, TextData):
        raise ConfigError(
            f"data.name is {data.name!r}; only documents (data.name: text) can be prepared. Other kinds are tokenized "
            "when a run starts."
        )
    data.check(model)
    configs: dict[str, TextSettings] = {"": data}
    if data.mix:
        configs = {
            name: dataclasses.replace(data, mix={}, source=each.source, text_field=each.text_field)
            for name, each in data.mix.items()
        }
    sources = [open_source(each) for each in configs.values()]
    made = make_tokenizer(data, sources, user_cache_dir(), model.vocab_size)
    check_vocabulary(made.vocab_size, model)
    return configs, made


def _report(progress: "Progress") -> None:
    line = f"{progress.parts} of {progress.all_parts} parts, {progress.tokens:,} tokens"
    if sys.stderr.isatty():
        print(f"\r{line}", end="" if progress.parts < progress.all_parts else "\n", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)
