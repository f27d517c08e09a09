"""The HTTP routes of the Tinker API, in front of a `LocalClient`."""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from stack_core.abi.errors import ArgumentError, EngineStopped, StackError
from stack_core.abi.generation import SamplingParams
from stack_core.runtime.http import KeyCheck, read_body, send_response
from stack_core.text.chat_server import ASGIApp
from stack_rl.tinker.local import LocalClient, SamplingClient, TrainingClient
from stack_rl.tinker.training import AdamParams
from stack_rl.tinker.wire import encode_forward_backward, encode_samples, messages, parse_forward_backward

__all__ = ["TinkerApp"]

_PREFIX: Final = "/api/v1/"
_JSON, _PROTOBUF = b"application/json", b"application/x-protobuf"
_WAIT_S: Final = 25.0
"""Longest wait for a result; clients ask again, and give up a connection after 45 s."""
_SESSION_S: Final = 600.0
"""Time without a heartbeat, which clients send every 10 s, after which a session has ended."""
_KEPT_RESULTS: Final = 4096
_KEPT_SAMPLERS: Final = 64
"""Number of sampling sessions of a client program; older ones end."""
_LARGEST_BODY: Final = 64 * 2**20
_OK, _BAD, _UNAUTHORIZED, _NOT_FOUND = 200, 400, 401, 404

NOTICE: Final = "This server adapts attention and feed-forward layers; the unembedding is that of the base model."


@dataclass
class _Session:
    """A client program: the time of its last heartbeat, and its adapters and samplers by identifier."""

    seen_s: float
    trainings: dict[str, TrainingClient] = field(default_factory=dict)
    samplers: dict[str, SamplingClient] = field(default_factory=dict)


@dataclass(frozen=True)
class _HTTPError(Exception):
    """An error response to a request."""

    status: int
    message: str


@dataclass(frozen=True)
class _Pending:
    """A result to be retrieved, and its encoding."""

    future: "Future[Any]"
    encode: Callable[[Any], tuple[bytes, bytes]]


class TinkerApp:
    """An ASGI application with the routes of the Tinker API; other paths go to `other`.

    Results are futures: a request is answered at once with an identifier, by which the client retrieves its result.
    A request that is sent again after a lost connection has the same number in its model or sampler, and is not
    repeated.

    Args:
      client: the adapters.
      other: application for the remaining paths.
      api_keys: accepted keys; empty accepts all.
    """

    def __init__(self, client: LocalClient, other: ASGIApp, *, api_keys: tuple[str, ...] = ()) -> None:
        messages()  # raises without protobuf, before the first request
        self._client, self._other = client, other
        self._allows = KeyCheck(api_keys) if api_keys else None
        self._sessions: dict[str, _Session] = {}
        self._results: OrderedDict[str, _Pending] = OrderedDict()
        self._clones: dict[str, int] = {}
        self._routes: Mapping[str, Callable[[dict[str, Any]], Any]] = {
            "client/config": lambda body: {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False},
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "healthz": lambda body: {"status": "ok"},
            "get_server_capabilities": self._capabilities,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request."""
        is_http, headers = scope["type"] == "http", dict(scope.get("headers", ()))
        if is_http and self._allows is not None and not self._allows(headers):
            message = "The API key is not one of this server's. Set TINKER_API_KEY."
            await send_response(send, _UNAUTHORIZED, _error(message))
            return
        if not is_http or not scope["path"].startswith(_PREFIX):
            await self._other(scope, receive, send)
            return
        try:
            content = await read_body(headers, receive, max_bytes=_LARGEST_BODY, error=_HTTPError)
            status, kind, body = _OK, *await self._answer(scope["path"].removeprefix(_PREFIX), content)
        except _HTTPError as error:
            status, kind, body = error.status, _JSON, _error(error.message)
        except (StackError, KeyError, TypeError, ValueError) as error:
            # The SDK validates its requests; for other clients, the message names the missing or invalid field.
            missing = f"{error} is missing." if isinstance(error, KeyError) else str(error)
            status, kind, body = _BAD, _JSON, _error(missing)
        # The SDK attributes an error without a content length to a proxy and repeats the request.
        await send_response(send, status, body, [(b"content-type", kind)])

    async def _answer(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        if path == "forward_backward":
            return _json(self._forward_backward(body))
        fields = json.loads(body) if body else {}
        if not isinstance(fields, dict):
            raise _HTTPError(_BAD, "The body is not a JSON object.")
        if path == "retrieve_future":
            return await self._retrieve(fields)
        if path.startswith("samplers/"):
            return _json(self._sampler_info(path.removeprefix("samplers/")))
        if path not in self._routes:
            known = ", ".join([*self._routes, "forward_backward", "retrieve_future", "samplers/ID"])
            raise _HTTPError(_NOT_FOUND, f"This server has no route {_PREFIX}{path}. It has: {known}.")
        return _json(self._routes[path](fields))

    # Sessions

    def _create_session(self, body: dict[str, Any]) -> dict[str, Any]:
        now_s = time.monotonic()
        self._sessions = {name: each for name, each in self._sessions.items() if now_s - each.seen_s < _SESSION_S}
        name = secrets.token_hex(8)
        self._sessions[name] = _Session(now_s)
        return {"type": "create_session", "session_id": name, "warning_message": NOTICE}

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            raise _HTTPError(_NOT_FOUND, f"There is no session {name!r}: it ended, or the server was restarted.")
        return self._sessions[name]

    def _heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        self._session(body["session_id"]).seen_s = time.monotonic()
        return {"type": "session_heartbeat"}

    def _capabilities(self, body: dict[str, Any]) -> dict[str, Any]:
        model = {
            "model_name": self._client.base_model,
            "max_context_length": self._client.checkpoint.max_positions,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # Training

    def _create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        name, session = self._model_name(body)
        lora = body.get("lora_config") or {}
        self._check_optimizer(body.get("optimizer_config"))

        def create() -> dict[str, Any]:
            self._check_base(body["base_model"])
            session.trainings[name] = self._client.create_lora_training_client(
                lora.get("rank", 32),
                seed=lora.get("seed"),
                train_attn=lora.get("train_attn", True),
                train_mlp=lora.get("train_mlp", True),
                model_id=name,
            )
            return {"type": "create_model", "model_id": name}

        return self._submitted(f"{name}:create", lambda: self._client.in_order(create))

    def _model_name(self, body: dict[str, Any]) -> tuple[str, _Session]:
        # The SDK forms the same name.
        return f"{body['session_id']}:train:{int(body['model_seq_id'])}", self._session(body["session_id"])

    def _check_base(self, name: str | None) -> None:
        if name != self._client.base_model:
            raise ArgumentError(f"This server has no model {name!r}; it serves {self._client.base_model!r}.")

    def _check_optimizer(self, config: Mapping[str, Any] | None) -> None:
        if (kind := (config or {}).get("type", "adamw")) != "adamw":
            raise _HTTPError(_BAD, f"This server has no optimizer {kind!r}. Use the default, adamw.")

    def _training(self, name: str) -> TrainingClient:
        session = self._session(name.partition(":")[0])
        if name not in session.trainings:
            raise _HTTPError(_NOT_FOUND, f"There is no model {name!r}, or its creation has not finished.")
        return session.trainings[name]

    def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        training, base = self._training(body["model_id"]), self._client.base_model
        data = {"arch": "language_model", "model_name": base, "tokenizer_id": base}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": training.model_id,
            "is_lora": True,
            "lora_rank": training.rank,
            "model_name": base,
        }

    def _forward_backward(self, body: bytes) -> dict[str, Any]:
        request, data, settings = parse_forward_backward(body)
        training = self._training(request.model_id)
        call = training.forward if request.forward_only else training.forward_backward
        return self._submitted(
            f"{request.model_id}:{request.seq_id}",
            lambda: call(data, request.loss_fn, settings),
            lambda output: (_PROTOBUF, encode_forward_backward(output)),
        )

    def _optim_step(self, body: dict[str, Any]) -> dict[str, Any]:
        training, params = self._training(body["model_id"]), body.get("adam_params")
        if params is None:
            raise _HTTPError(_BAD, "This server has no optimizer but Adam. Give tinker.AdamParams.")
        adam = AdamParams(**params)
        return self._numbered(body, lambda: training.optim_step(adam), lambda metrics: {"metrics": dict(metrics)})

    def _save_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        training = self._training(body["model_id"])
        _refuse(body, "ttl_seconds", "Weights stay until they are deleted. Leave ttl_seconds out.")
        _refuse(body, "user_metadata", "This server keeps no metadata. Leave user_metadata out.")
        save = lambda: training.save_state(_name_of(body), overwrite=bool(body.get("overwrite")))
        return self._numbered(body, save, lambda path: {"type": "save_weights", "path": path})

    def _load_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_optimizer(body.get("optimizer_config"))
        optimizer, path = bool(body["optimizer"]), body["path"]
        if body.get("model_id") is not None:
            training = self._training(body["model_id"])
            return self._numbered(
                body,
                lambda: training.load_state(path, optimizer=optimizer),
                lambda _: {"type": "load_weights", "path": path, "model_id": training.model_id},
            )
        name, session = self._model_name(body)

        def create() -> dict[str, Any]:
            self._check_base(body.get("base_model") or self._client.base_model)
            session.trainings[name] = self._client.create_training_client_from_state(
                path, optimizer=optimizer, model_id=name
            )
            return {"type": "load_weights", "path": path, "model_id": name}

        return self._submitted(f"{name}:create", lambda: self._client.in_order(create))

    # Sampling

    def _save_for_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        training = self._training(body["model_id"])
        _refuse(body, "ttl_seconds", "Weights stay until they are deleted. Leave ttl_seconds out.")
        if body.get("kind", "snapshot") != "snapshot":
            raise _HTTPError(_BAD, "This server samples only from snapshots. Leave kind out, and save again to update.")
        kind = "save_weights_for_sampler"
        if body.get("path") is not None:
            save = lambda: training.save_weights_for_sampler(body["path"])
            return self._numbered(body, save, lambda path: {"type": kind, "path": path})
        name, session = self._sampler_name(body, body["model_id"].partition(":")[0])

        def make() -> dict[str, Any]:
            session.samplers[name] = training.snapshot()
            if len(session.samplers) > _KEPT_SAMPLERS:
                del session.samplers[next(iter(session.samplers))]
            return {"type": kind, "path": None, "sampling_session_id": name}

        return self._numbered(body, lambda: self._client.in_order(make))

    def _create_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        name, session = self._sampler_name(body, body["session_id"])
        path, base = body.get("model_path"), body.get("base_model")
        if path is None:
            self._check_base(base)
        session.samplers[name] = self._client.create_sampling_client(path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sampler_name(self, body: dict[str, Any], session: str) -> tuple[str, _Session]:
        return f"{session}:sample:{int(body['sampling_session_seq_id'])}", self._session(session)

    def _sampler(self, name: str) -> SamplingClient:
        session = self._session(name.partition(":")[0])
        if name not in session.samplers:
            raise _HTTPError(
                _NOT_FOUND, f"There is no sampling session {name!r}, or {_KEPT_SAMPLERS} later ones ended it."
            )
        return session.samplers[name]

    def _sampler_info(self, name: str) -> dict[str, Any]:
        self._sampler(name)
        return {"sampler_id": name, "base_model": self._client.base_model, "model_path": None}

    def _join_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["sampling_session_id"]
        self._sampler(name)
        self._clones[name] = self._clones.get(name, 0) + 1
        return {"type": "join_sampling_session", "client_counter": self._clones[name]}

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("sampling_session_id") is None:
            raise _HTTPError(_BAD, "Sample through a sampling session (ServiceClient.create_sampling_client).")
        name, count = body["sampling_session_id"], int(body.get("num_samples", 1))
        sampler, wants_prompt = self._sampler(name), bool(body.get("prompt_logprobs"))
        unsupported = {
            "target_prompt_logprobs": "Use prompt_logprobs, or forward with cross_entropy.",
            "prompt_alt_tokens_k": "Sample from each prefix.",
            "prompt_logprobs_last_n": "All of the prompt is scored.",
            "record_stability_info": "Use the losses ppo or cispo.",
        }
        for key, advice in unsupported.items():
            _refuse(body, key, f"This server does not support {key}. {advice}")
        sampling, prompt = _sampling(body["sampling_params"]), _tokens(body["prompt"])
        key = f"{name}:{body.get('seq_id', secrets.token_hex(8))}"
        answer = self._submitted(
            key,
            lambda: sampler.sample(
                prompt,
                count,
                sampling,
                include_prompt_logprobs=wants_prompt,
                topk_prompt_logprobs=int(body.get("topk_prompt_logprobs", 0)),
                topk_sample_logprobs=int(body.get("topk_sample_logprobs", 0)),
            ),
            lambda output: (_PROTOBUF, encode_samples(output, prompt_logprobs=wants_prompt)),
        )
        return {**answer, "sample_sequence_ids": [f"{key}:{index}" for index in range(count)]}

    # Results

    def _numbered(
        self,
        body: Mapping[str, Any],
        start: Callable[[], "Future[Any]"],
        encode: Callable[[Any], Any] = lambda value: value,
    ) -> dict[str, Any]:
        key = f"{body['model_id']}:{int(body['seq_id'])}"
        return self._submitted(key, start, lambda value: _json(encode(value)))

    def _submitted(
        self,
        key: str,
        start: Callable[[], "Future[Any]"],
        encode: Callable[[Any], tuple[bytes, bytes]] = lambda value: (_JSON, json.dumps(value).encode()),
    ) -> dict[str, Any]:
        """Starts a call, unless it was started before, and returns the identifier of its result."""
        if key not in self._results:
            future: Future[Any]
            try:
                future = start()
            except StackError as error:
                future = Future()
                future.set_exception(error)
            self._results[key] = _Pending(future, encode)
            while len(self._results) > _KEPT_RESULTS and next(iter(self._results.values())).future.done():
                self._results.popitem(last=False)
        return {"request_id": key, "model_id": None}

    async def _retrieve(self, body: dict[str, Any]) -> tuple[bytes, bytes]:
        key = body["request_id"]
        if key not in self._results:
            raise _HTTPError(_NOT_FOUND, f"There is no request {key!r}, or its result is gone.")
        pending = self._results[key]
        waiting = asyncio.wrap_future(pending.future)
        done, _ = await asyncio.wait([waiting], timeout=_WAIT_S)
        if not done:
            # Cancelling the wrapper would cancel the call.
            waiting.add_done_callback(lambda future: future.cancelled() or future.exception())
            return _json({"type": "try_again", "request_id": key, "queue_state": "active"})
        try:
            return pending.encode(waiting.result())
        except EngineStopped as error:
            return _json({"error": str(error), "category": "server"})
        except StackError as error:
            return _json({"error": str(error), "category": "user"})
        except Exception as error:  # a fault of this server must reach its client, which otherwise waits forever
            return _json({"error": f"{type(error).__name__}: {error}", "category": "server"})

    def _cancel(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["request_id"] not in self._results:
            raise _HTTPError(_NOT_FOUND, f"There is no request {body['request_id']!r}.")
        return {}


def _json(value: Any) -> tuple[bytes, bytes]:
    return _JSON, json.dumps(value).encode()


def _error(message: str) -> bytes:
    return json.dumps({"error": message, "detail": message}).encode()


def _refuse(body: Mapping[str, Any], key: str, message: str) -> None:
    if body.get(key):
        raise _HTTPError(_BAD, message)


def _name_of(body: Mapping[str, Any]) -> str:
    return body.get("path") or f"step-{int(body['seq_id'])}"


def _tokens(prompt: Mapping[str, Any]) -> list[int]:
    chunks = prompt["chunks"]
    if any("tokens" not in chunk for chunk in chunks):
        raise _HTTPError(_BAD, "The prompt has an image or audio, which this server does not take. Give tokens.")
    return [token for chunk in chunks for token in chunk["tokens"]]


def _sampling(params: Mapping[str, Any]) -> SamplingParams:
    """Converts the sampling settings of the Tinker API, where `stop` replaces the model's own end tokens."""
    values = {
        name: params[name] for name in ("max_tokens", "seed", "temperature", "top_p") if params.get(name) is not None
    }
    if params.get("top_k", -1) > 0:
        values["top_k"] = params["top_k"]
    stop = params.get("stop")
    if stop is not None:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        key = "stop" if stops and isinstance(stops[0], str) else "stop_tokens"
        values |= {key: stops, "ignore_eos": True}
    return SamplingParams(**values)
