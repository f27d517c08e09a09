"""`stack serve`: a language model behind OpenAI's HTTP interface, or bundles behind the Open Inference Protocol."""

import gc
import json as json_format
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.runtime.compile_cache import keep_compiled
from stack_serve.commands.serve_repository import check_known, serve_repository

__all__ = ["serve"]

_BETWEEN_LINES_S = 5.0
_OF_REPOSITORIES = frozenset({"grpc_port", "live_versions", "max_json_bytes", "poll_s"})
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(  # noqa: PLR0913, each parameter is an option of the command
    model: str | None = None,
    /,
    *,
    repository: Path | None = None,
    live_versions: int | None = None,
    poll_s: float | None = None,
    grpc_port: int | None = None,
    host: str | None = None,
    port: int | None = None,
    api_key: tuple[str, ...] = (),
    api_key_file: Path | None = None,
    model_name: tuple[str, ...] = (),
    chat_template: Path | None = None,
    engine: str | None = None,
    timeout_s: float | None = None,
    drain_s: float | None = None,
    max_body_bytes: int | None = None,
    max_json_bytes: int | None = None,
    cors_origin: tuple[str, ...] = (),
    access_log: Annotated[bool, Parameter(negative=())] = False,
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    step_tokens: int | None = None,
    decode_repeats: int | None = None,
    page_tokens: int | None = None,
    pages: int | None = None,
    memory_fraction: float | None = None,
    cache_dtype: Literal["model", "float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"] | None = None,
    tensor: int | None = None,
    prefix_caching: bool | None = None,
    adapter: tuple[str, ...] = (),
    max_adapters: int | None = None,
    adapter_rank: int | None = None,
    max_waiting: int | None = None,
    priorities: int | None = None,
    seed: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Serve a language model as OpenAI and vLLM do, or bundles: stack serve RUN|HF_DIR | --repository DIR [--port 8000]

    It listens at once, and answers requests with status 503 until everything is compiled; /ready tells how far that is.
    SIGTERM lets running requests end and exits with status 0; a second one ends at once.

    A repository holds bundles as MODEL/VERSION/ and is served by the Open Inference Protocol; versions that come or go
    are loaded and unloaded while others answer.

    Args:
      model: directory of a run or of a Hugging Face checkpoint.
      repository: directory of bundles to serve instead.
      live_versions: of each bundle, counted from the newest; 0 is all (1).
      poll_s: how often the repository is looked at; 0 never, so that clients load and unload (1).
      grpc_port: to serve a repository over gRPC, too, which needs stack-serve[grpc]; 0 takes a free one.
      host: address to listen on (127.0.0.1: this machine alone).
      port: to listen on (8000); 0 takes a free one.
      api_key: what clients must send as a bearer token; may be given several times ($STACK_API_KEY).
      api_key_file: file with such keys, one a line.
      model_name: what clients call the model (its own name); may be given several times.
      chat_template: file with a Jinja template for messages (the model's own).
      engine: what generates (llm); the options from max-sequences to seed are of `llm`, the others have none.
      timeout_s: a request that takes longer ends with an error (never).
      drain_s: how long running requests may take to end after SIGTERM (30).
      max_body_bytes: of a request (8388608; of a repository's 268435456).
      max_json_bytes: of a repository's request in JSON; larger tensors are sent as binary (16777216).
      cors_origin: of web pages that may use the server, "*" for all; may be given several times.
      access_log: write a line for each request to standard error: when, who, what, status, seconds and its id.
      max_sequences: continuations that run at once; others wait (32).
      max_tokens: of a prompt and its continuation together (as many as the model has positions).
      step_tokens: tokens that one step computes, at most (512).
      decode_repeats: tokens of each sequence that are decoded and told together, at most, while that is quick (8).
      page_tokens: tokens of a page of the cache (16).
      pages: of the cache (what the other options need, or what fits in memory).
      memory_fraction: of the memory that the parameters leave free, what the cache may take (0.5).
      cache_dtype: what keys and values are held in (what the model computes in).
      tensor: devices that each layer is split over (1).
      prefix_caching: keep prompts for later requests that begin alike (yes).
      max_waiting: continuations that may wait before others are refused (1024).
      adapter: NAME=DIR, an adapter that requests name as their model: a run that was trained with adapters, or a
        directory of PEFT; may be given several times.
      max_adapters: that are ready at once (8); of those that no request uses, the one used longest ago gives way.
      adapter_rank: the most that adapters may have which are loaded later (that of those given).
      priorities: let requests go before or behind others, by a `priority` that counts from -N to N (0: they may not).
      seed: of requests without one (a new one each time).
      json: print address, model and process on standard output when it is ready, as JSON.
    """
    options = {name: value for name, value in locals().items() if value is not None and value != ()}
    from stack_serve.http.config import ServerConfig
    from stack_serve.openai.config import OpenAIConfig

    if (model is None) == (repository is None):
        raise ConfigError("Name what to serve: either a model, or --repository DIR with bundles.")
    listening = _only(OpenAIConfig if repository is None else ServerConfig, options)
    named = (*api_key, *(_keys_of(api_key_file) if api_key_file is not None else ()))
    keys = named or tuple(filter(None, [os.environ.get("STACK_API_KEY")]))
    listening |= {"api_keys": keys, "cors_origins": cors_origin}
    if model_name and repository is None:
        listening["model_names"] = model_name
    if repository is None:
        check_known(options, options.keys() - _OF_REPOSITORIES, "for a repository of bundles only. Add --repository")
    config = parse(OpenAIConfig if repository is None else ServerConfig, listening)
    if config.host not in _LOOPBACK and not keys:
        _say(f"warning: whoever reaches {config.host} may use the model. Give an --api-key, or listen on 127.0.0.1.")
    if access_log:
        _log_access()
    if repository is not None:
        serve_repository(repository, config, options, json=json)
    else:
        assert model is not None
        _serve(model, engine or "llm", config, options, json=json)


def _serve(model: str, engine_name: str, config: Any, options: dict[str, Any], *, json: bool) -> None:
    from stack_core.abi.engines import checked_engine
    from stack_core.abi.model_formats import open_for_generation
    from stack_core.abi.plugins import registries
    from stack_serve.http.server import HttpServer, listen  # imports what `stack --help` should not wait for
    from stack_serve.llm.config import EngineConfig
    from stack_serve.openai.served import OpenAIApp
    from stack_serve.openai.service import Service

    adapters = _adapters_of(options.get("adapter", ()))
    given = _only(EngineConfig, options) | ({"adapters": adapters} if adapters else {})
    if engine_name != "llm" and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} {'is' if len(given) == 1 else 'are'} of the engine llm, not of {engine_name}.")
    engine_config = parse(EngineConfig, given)
    make_engine = registries.engines[engine_name]
    with listen(config) as listener:  # before a large model is read for nothing
        keep_compiled()
        _say(f"loading {model}")
        checkpoint = open_for_generation(model)
        service = Service(checkpoint, config, engine_config.max_tokens, tuple(engine_config.adapters))

        made: Any = None

        def engine() -> Any:
            nonlocal made
            is_llm = engine_name == "llm"
            found = make_engine(checkpoint, engine_config, progress=progress) if is_llm else make_engine(checkpoint)
            made = checked_engine(engine_name, found)
            service.progress = "compiling"
            _say("compiling; requests get status 503 until it is done")
            return made

        told_s = time.monotonic()

        def progress(what: str, done: int, total: int) -> None:
            nonlocal told_s
            service.progress = f"compiled {done} of {total} programs, {what} the last"
            if sys.stderr.isatty():
                line = f"\r\x1b[Kstack: {service.progress}"
                print(line, end="\n" * (done == total), file=sys.stderr, flush=True)
            elif done in (1, total) or time.monotonic() >= told_s + _BETWEEN_LINES_S:
                told_s = time.monotonic()
                _say(service.progress)

        def announce(address: str) -> None:
            gc.collect()
            gc.freeze()  # a search through all that was loaded would stop every answer for a tenth of a second
            if json:
                ready = {"address": address, "model": service.names[0], "process": os.getpid()}
                print(json_format.dumps(ready), flush=True)
            _say(f"{service.names[0]} is served at {address}/v1")
            if engine_name == "llm" and made is not None:
                _say(f"memory: {made.memory()}")

        # So long the event loop and the engine wait for another thread that computes in Python; 5 ms by default.
        sys.setswitchinterval(0.001)
        HttpServer(OpenAIApp(service, engine), listener, config, announce=announce).run()


def _only(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a config."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in options.items() if name in names}


def _adapters_of(given: Sequence[str]) -> dict[str, str]:
    """The addresses of adapters by their names, of NAME=DIR."""
    found: dict[str, str] = {}
    for each in given:
        name, _, address = each.partition("=")
        if not name or not address:
            raise ConfigError(f"--adapter {each}: expected NAME=DIR, such as mine=runs/lora.")
        if name in found:
            raise ConfigError(f"Two adapters are called {name!r}. Give each a name of its own.")
        found[name] = address
    return found


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The keys cannot be read: {error}. Name a file with one key a line.") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{path} holds no key. Write one a line, or leave --api-key-file out to let everybody in.")
    return keys


def _log_access() -> None:
    """Writes what the server tells of each request to standard error."""
    import logging

    from stack_serve.http.access import LOG

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def _say(message: str) -> None:
    print(f"stack: {message}", file=sys.stderr, flush=True)
