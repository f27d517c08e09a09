"""`stack serve`: a server of a model with OpenAI's API, or of bundles with the Open Inference Protocol."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_serve.checks import API_KEY_VARIABLE
from stack_serve.commands.collecting import collections_paused
from stack_serve.commands.messages import say
from stack_serve.commands.options import check_known, select_options
from stack_serve.commands.serve_images import serve_images
from stack_serve.commands.serve_language_model import serve_language_model
from stack_serve.commands.serve_repository import serve_repository

__all__ = ["serve"]

_OF_REPOSITORIES = frozenset({"grpc_port", "live_versions", "max_json_bytes", "poll_s"})
_COMMON = {"access_log", "api_key", "api_key_file", "cors_origin", "json", "model", "model_name"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@collections_paused()
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
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    pooling: Literal["last", "mean", "cls"] | None = None,
    stored_responses: int | None = None,
    adapter_loading: bool | None = None,
    sleep_mode: bool | None = None,
    weight_updates: bool | None = None,
    remote_images: bool | None = None,
    engine: str | None = None,
    timeout_s: float | None = None,
    drain_s: float | None = None,
    max_body_bytes: int | None = None,
    max_json_bytes: int | None = None,
    cors_origin: tuple[str, ...] = (),
    access_log: Annotated[bool, Parameter(negative=())] = False,
    traces: Annotated[bool, Parameter(negative=())] = False,
    max_sequences: Annotated[int | None, Parameter(alias="--max-num-seqs")] = None,
    max_tokens: Annotated[int | None, Parameter(alias="--max-model-len")] = None,
    step_tokens: Annotated[int | None, Parameter(alias="--max-num-batched-tokens")] = None,
    decode_repeats: int | None = None,
    page_tokens: int | None = None,
    pages: int | None = None,
    memory_fraction: float | None = None,
    cache_dtype: Literal["model", "float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"] | None = None,
    tensor: int | None = None,
    expert: int | None = None,
    data_parallel: int | None = None,
    prefill_engines: int | None = None,
    router: str | None = None,
    hosts: int | None = None,
    launcher: str | None = None,
    cluster_address: str | None = None,
    token_file: str | None = None,
    prefix_caching: bool | None = None,
    embeddings: bool | None = None,
    adapter: tuple[str, ...] = (),
    max_adapters: int | None = None,
    adapter_rank: int | None = None,
    max_waiting: int | None = None,
    max_images: int | None = None,
    priorities: int | None = None,
    dequantize: bool | None = None,
    seed: int | None = None,
    speculation: str | None = None,
    draft_model: str | None = None,
    logits_processors: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = (),
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Serve a model of texts or images with OpenAI's API, or bundles: stack serve RUN|hf:DIR | --repository DIR

    The server listens immediately and answers with status 503 until the first programs are compiled; /ready reports the
    progress. Programs for other numbers of rows and tokens are compiled while it serves. On SIGTERM it waits for
    running requests and exits with status 0; a second SIGTERM exits immediately.

    A repository contains bundles as MODEL/VERSION/ and is served with the Open Inference Protocol. New versions are
    loaded and deleted versions are unloaded without interrupting other models.

    Args:
      model: directory of a run, of a Hugging Face checkpoint or of a diffusers pipeline, hf:ORG/MODEL of the hub, or
        gguf:FILE.
      repository: directory of bundles to serve instead.
      live_versions: number of newest versions to serve of each model; 0 is all (1).
      poll_s: seconds between scans of the repository; with 0, only clients load and unload models (1).
      grpc_port: port of an additional gRPC server of the repository, needs stack-serve[grpc]; 0 is any free port.
      host: address to listen on (127.0.0.1, reachable only from this machine).
      port: port to listen on (8000); 0 is any free port.
      api_key: key that clients must send as a bearer token; may be repeated ($STACK_API_KEY).
      api_key_file: file with API keys, one per line.
      model_name: model name for clients (the name of the checkpoint); may be repeated.
      chat_template: file with a Jinja template for messages (the template of the model).
      tool_parser: format of the model's tool calls, e.g. hermes, or none (recognized by the chat template).
      reasoning_parser: format of the model's reasoning, e.g. qwen3, or none (recognized by the chat template).
      pooling: embedding of a text: the hidden state of its last or first (cls) token, or the mean over its tokens
        (recommendation of an encoder's directory; last for language models).
      stored_responses: maximum number of responses in memory that later ones continue (256); 0 keeps none.
      adapter_loading: let clients load adapters from paths on this machine, and unload them (no).
      sleep_mode: let clients free the device memory by /sleep, until /wake_up (no).
      weight_updates: let clients load weights of the same model from paths on this machine, by
        /update_weights_from_disk (no).
      remote_images: fetch images of chat messages from http(s) URLs; data URLs are always read (no).
      engine: generation engine (llm); only `llm` accepts the options from max-sequences to logits-processors.
      timeout_s: timeout of a request in seconds, after which it ends with an error (no timeout).
      drain_s: maximum seconds to wait for running requests after SIGTERM (30).
      max_body_bytes: maximum size of a request body (8388608; with --repository, 268435456).
      max_json_bytes: maximum size of a JSON request to a repository; larger tensors must be binary (16777216).
      cors_origin: allowed origin of web pages, "*" for all; may be repeated.
      access_log: log each request to standard error: time, client, method, path, status, duration and request id.
      traces: export OpenTelemetry spans of requests, to http://localhost:4318 unless OTEL_* variables say otherwise;
        needs stack-serve[otel].
      max_sequences: maximum number of continuations that run concurrently; others wait (32).
      max_tokens: maximum total length of a prompt and its continuation (the maximum of the model).
      step_tokens: maximum number of tokens per step (512).
      decode_repeats: maximum number of decoding steps per launch, limited to about 40 ms (8).
      page_tokens: number of tokens per cache page (16).
      pages: number of cache pages (enough for max-sequences of max-tokens, or as many as fit in memory).
      memory_fraction: fraction of the memory left free by the parameters that the cache may use (0.5; on CPUs a
        quarter, at most 2 GiB).
      cache_dtype: dtype of the cached keys and values (the dtype in which the model computes them).
      tensor: number of devices over which each layer is sharded (1).
      expert: number of devices over which the experts of a mixture are divided (1).
      data_parallel: number of engines that share the requests, each in a process with its own devices, on CPUs with its
        own cores (1).
      prefill_engines: number of further engines that compute prompts and hand over their keys, known as disaggregated
        prefill (0).
      router: choice of the engine of a request, cache_aware (the engine that has the longest prefix of the prompt in
        its cache, within a bound on its load) or round_robin (cache_aware).
      hosts: number of hosts over which the engine is sharded (1); --tensor times --expert is the number of devices of
        all hosts together.
      launcher: launcher that starts the agents on the hosts, such as processes, which is this machine (processes).
      cluster_address: address where this process listens for the hosts (127.0.0.1:0); other machines must reach it.
      token_file: file with the secret shared by the hosts, for --launcher joined.
      prefix_caching: reuse cache pages of prompts with the same prefix (yes, unless the model is recurrent).
      embeddings: compile the programs of embeddings at the start (no: on first use).
      max_waiting: maximum number of waiting continuations (1024) or images (64); more are refused.
      max_images: maximum number of images that are computed concurrently (4); image models only.
      adapter: NAME=DIR, an adapter that requests select with NAME as their model; DIR is a run trained with adapters
        or a PEFT directory; may be repeated.
      max_adapters: maximum number of adapters on the devices (8); the least recently used idle one is evicted first.
      adapter_rank: maximum rank of adapters loaded later (the largest rank of the given adapters).
      priorities: N, the bound of request priorities, which range from -N to N (0: requests must not set one).
      dequantize: read the weights of a quantized GGUF file or `hf:` checkpoint as floats, which takes up to eight times
        the memory (no).
      seed: seed of the requests without one (random).
      speculation: method of speculative decoding, ngram, draft or mtp, or its settings as JSON, such as
        '{"method": "ngram", "tokens": 5}' (no speculation). Outputs stay the same.
      draft_model: small model with the same tokenizer that drafts for --speculation draft: a run, hf:DIR or gguf:FILE.
      logits_processors: registered logits processors that requests may select, in the order in which they apply.
      json: when ready, print the address, model and process id to standard output as JSON.
    """
    options = {name: value for name, value in locals().items() if value is not None and value != ()}
    from stack_core.text.image_models import has_image_model
    from stack_serve.http.config import ServerConfig
    from stack_serve.http.traces import tracer_provider
    from stack_serve.images.config import ImageServerConfig
    from stack_serve.openai.config import OpenAIConfig

    if (model is None) == (repository is None):
        raise ConfigError("Name what to serve: either a model, or --repository DIR with bundles.")
    is_image_model = model is not None and has_image_model(model)
    kind = ServerConfig if model is None else ImageServerConfig if is_image_model else OpenAIConfig
    listening = select_options(kind, options)
    named = (*api_key, *(_keys_of(api_key_file) if api_key_file is not None else ()))
    keys = named or tuple(filter(None, [os.environ.get(API_KEY_VARIABLE)]))
    listening |= {"api_keys": keys, "cors_origins": cors_origin}
    if model_name and repository is None:
        listening["model_names"] = model_name
    if repository is None:
        check_known(options, options.keys() - _OF_REPOSITORIES, "for a repository of bundles only. Add --repository")
    if is_image_model:
        check_known(options, listening.keys() | _COMMON, f"not for {model}, which generates images. Leave it out")
    else:
        check_known(options, options.keys() - {"max_images"}, "for image models only. Leave it out")
    config: Any = parse(kind, listening)
    if config.host not in _LOOPBACK and not keys:
        say(f"warning: any client that reaches {config.host} can use the model. Set --api-key or listen on 127.0.0.1.")
    if config.traces:
        tracer_provider()  # fail on a missing package before loading a large model
    if access_log:
        _log_access()
    if repository is not None:
        serve_repository(repository, config, options, json=json)
    elif is_image_model:
        serve_images(str(model), config, json=json)
    else:
        assert model is not None
        serve_language_model(model, engine or "llm", config, options, json=json)


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API keys cannot be read: {error}. Give a file with one key per line.") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{path} contains no keys. Write one per line, or omit --api-key-file to allow all clients.")
    return keys


def _log_access() -> None:
    """Sends the access log to standard error."""
    import logging

    from stack_serve.http.access import LOG

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
