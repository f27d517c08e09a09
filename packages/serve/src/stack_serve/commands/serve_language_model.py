"""`stack serve` of a language model or an encoder: a server with OpenAI's API, of one engine or several."""

import json as json_format
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.runtime.compile_cache import keep_compiled
from stack_serve.commands.collecting import exempt_imports, resume_collections
from stack_serve.commands.messages import print_ready, say
from stack_serve.commands.options import flags_of, select_options

if TYPE_CHECKING:
    from stack_serve.openai.config import OpenAIConfig

__all__ = ["serve_language_model"]

_BETWEEN_LINES_S = 5.0


def serve_language_model(
    model: str, engine_name: str, config: "OpenAIConfig", options: Mapping[str, Any], *, json: bool
) -> None:
    """Serves a language model or an encoder until the process receives a signal to terminate.

    Args:
      model: address of the model.
      engine_name: registered name of the engine.
      config: settings of the server.
      options: options of the command.
      json: prints the address, model and process id as JSON when ready.

    Raises:
      ConfigError: an option is not valid, or the address is in use.
      StackError: the model cannot be opened.
    """
    from stack_core.abi.plugins import registries

    # These imports are too slow for `stack --help`.
    from stack_serve.http.server import HttpServer, listen
    from stack_serve.llm.config import EngineConfig
    from stack_serve.llm.logits_processors import open_processors
    from stack_serve.openai.lifecycle import OpenAIApp
    from stack_serve.openai.service import Service

    given = _engine_options(EngineConfig, options)
    if engine_name != "llm" and given:
        verb = "is" if len(given) == 1 else "are"
        raise ConfigError(f"{flags_of(given)} {verb} for the engine llm, not for {engine_name}. Leave it out.")
    if engine_name == "llm":
        _check_used(options)
    engine_config = parse(EngineConfig, given)
    parallel = _parallel_config(engine_name, engine_config, options)
    # Fail on an unknown name before loading a large model.
    registries.engines[engine_name]
    open_processors(engine_config.logits_processors)
    with listen(config) as listener:  # fail on a used address before loading a large model
        keep_compiled()
        say(f"loading {model}")
        checkpoint = _open_model(model, parallel)
        adapters, engines = tuple(engine_config.adapters), 1 if parallel is None else parallel.engines
        service = Service(checkpoint, config, engine_config.max_tokens, adapters, engines=engines)

        made: Any = None

        def engine() -> Any:
            nonlocal made
            exempt_imports()
            progress = _progress_printer(service)
            if parallel is None:
                made = _make_engine(engine_name, checkpoint, engine_config, progress)
            else:
                made = _make_engines(model, engine_config, parallel, progress)
            service.progress = "compiling"
            say("compiling the first programs; requests get status 503 until it is done")
            return made

        def announce(address: str) -> None:
            resume_collections()
            if json:
                print_ready(address, model=service.names[0])
            say(f"{service.names[0]} is served at {address}/v1")
            if sys.stderr.isatty():
                print(_next_steps(address, service.names[0], service.is_encoder), file=sys.stderr, flush=True)
            if engine_name == "llm" and made is not None:
                say(f"memory: {made.memory()}")

        # Limits how long the event loop and the engine wait for the GIL (default 5 ms).
        sys.setswitchinterval(0.001)
        HttpServer(OpenAIApp(service, engine), listener, config, announce=announce).run()


def _progress_printer(service: Any) -> Any:
    """Returns a callback that shows the progress of compilation, to clients and on standard error."""
    printed_s = time.monotonic()

    def progress(program: str, compiled: int, total: int) -> None:
        nonlocal printed_s
        service.progress = f"compiled {compiled} of {total} programs, most recently {program}"
        if sys.stderr.isatty():
            line = f"\r\x1b[Kstack: {service.progress}"
            print(line, end="\n" * (compiled == total), file=sys.stderr, flush=True)
        elif compiled in (1, total) or time.monotonic() >= printed_s + _BETWEEN_LINES_S:
            printed_s = time.monotonic()
            say(service.progress)

    return progress


def _open_model(model: str, parallel: Any) -> Any:
    from stack_core.abi.model_formats import open_for_generation

    if parallel is None:
        return open_for_generation(model, encoders=True)
    import jax

    from stack_serve.parallel.opening import check_parallel

    jax.config.update("jax_platforms", "cpu")  # the devices belong to the engines' processes
    checkpoint = open_for_generation(model, encoders=True)
    check_parallel(checkpoint, parallel)
    return checkpoint


def _make_engines(model: str, config: Any, parallel: Any, progress: Any) -> Any:
    from stack_serve.parallel.engine import ParallelEngine
    from stack_serve.parallel.opening import open_replica, open_sharded

    open_engine = open_sharded if parallel.hosts > 1 else open_replica
    return ParallelEngine(partial(open_engine, model, config), config, parallel, progress=progress)


def _parallel_config(engine_name: str, engine_config: Any, options: Mapping[str, Any]) -> Any:
    """Returns the settings of several engines, or None for one in this process."""
    from stack_serve.llm.group_checks import check_config
    from stack_serve.parallel.config import ParallelConfig

    given = select_options(ParallelConfig, options)
    if not given:
        return None
    if engine_name != "llm":
        raise ConfigError(f"{flags_of(given)}: for the engine llm, not for {engine_name}. Leave it out.")
    config = parse(ParallelConfig, given)
    if config.prefill_engines and (engine_config.draft_model is not None or engine_config.prefix_caching is False):
        raise ConfigError(
            "--prefill-engines hands keys over to the prefix cache, which --no-prefix-caching turns off, and whose "
            "pages lack the keys of a --draft-model. Leave one of the options out."
        )
    if config.hosts > 1:
        check_config(engine_config, config.hosts)
        _check_options_over_hosts(options)
        return config
    if of_hosts := [name for name in ("launcher", "cluster_address", "token_file") if name in given]:
        raise ConfigError(f"{flags_of(of_hosts)}: only for several hosts. Add --hosts 2, or leave it out.")
    if config.engines > 1:
        return config
    if "router" in given:
        raise ConfigError("--router chooses among several engines. Add --data-parallel 2, or leave it out.")
    return None


def _check_options_over_hosts(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for options of a server that an engine over several hosts does not support."""
    refused = [name for name in ("adapter_loading", "sleep_mode", "weight_updates", "router") if options.get(name)]
    if refused:
        raise ConfigError(
            f"{flags_of(refused)}: not available with --hosts {options['hosts']}. Leave it out, or serve the model on "
            "one host."
        )


def _make_engine(name: str, checkpoint: Any, config: Any, progress: Any) -> Any:
    from stack_core.abi.engines import checked_engine
    from stack_core.abi.plugins import registries
    from stack_core.text.embeddings import check_generates, is_encoder
    from stack_serve.llm.encoder_engine import EncoderEngine

    if name != "llm":
        check_generates(checkpoint)
        return checked_engine(name, registries.engines[name](checkpoint))
    make = EncoderEngine if is_encoder(checkpoint) else registries.engines[name]
    return checked_engine(name, make(checkpoint, config, progress=progress))


def _check_used(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for options without effect, or warns if only their requests are refused."""
    of_adapters = [name for name in ("max_adapters", "adapter_rank", "adapter_loading") if options.get(name)]
    if not of_adapters or options.get("adapter"):
        return
    # Programs apply adapters only to the parameters that had one at the start.
    reason = "the server has no adapters, and without one at the start none can be loaded later"
    if of_adapters != ["adapter_loading"]:
        raise ConfigError(f"{flags_of(of_adapters)}: {reason}. Add --adapter NAME=DIR, or leave it out.")
    say(f"warning: --adapter-loading: {reason}: requests to load one are refused. Add --adapter NAME=DIR.")


def _engine_options(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the engine among the options."""
    adapters = _adapters_of(options.get("adapter", ()))
    given: dict[str, Any] = select_options(cls, options) | ({"adapters": adapters} if adapters else {})
    if "speculation" in given:
        given["speculation"] = _speculation_of(given["speculation"])
    return given


def _adapters_of(arguments: Sequence[str]) -> dict[str, str]:
    """Parses NAME=DIR arguments into a mapping from adapter name to address."""
    found: dict[str, str] = {}
    for each in arguments:
        name, _, address = each.partition("=")
        if not name or not address:
            raise ConfigError(f"--adapter {each}: expected NAME=DIR, such as mine=runs/lora.")
        if name in found:
            raise ConfigError(f"Two adapters have the name {name!r}. Give each a unique name.")
        found[name] = address
    return found


def _speculation_of(argument: str) -> Any:
    """Parses a method of speculation, or its settings as JSON."""
    if not argument.startswith("{"):
        return argument
    try:
        return json_format.loads(argument)
    except json_format.JSONDecodeError as error:
        raise ConfigError(
            f"--speculation {argument}: {error}. Give ngram, draft or mtp, or its settings as JSON."
        ) from None


def _next_steps(address: str, model: str, is_encoder: bool) -> str:
    """Returns what to try with a server, for a person at a terminal."""
    if is_encoder:
        body = json_format.dumps({"model": model, "input": "Hello"})
        return f"  from a script: curl {address}/v1/embeddings -H 'Content-Type: application/json' -d '{body}'"
    body = json_format.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    return (
        f"  in a browser:  {address}/\n"
        f"  in a terminal: stack chat {address}\n"
        f"  from a script: curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )
