"""`environment.name: verifiers`: environments of the verifiers library, with their rubrics as rewards."""

import contextlib
import functools
import importlib
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.installing import install_command
from stack_core.functions import import_function
from stack_rl.contracts import Score, Tasks, Verdict
from stack_rl.environments.agent import AgentAccess, AgentLimits, agent_tasks
from stack_rl.environments.agent_server import check_server
from stack_rl.environments.optional import optional_module
from stack_rl.environments.records import Record

__all__ = ["VerifiersConfig"]


@config
class VerifiersConfig:
    """Single-turn and multi-turn environments of verifiers, as `verifiers.load_environment` returns them.

    The environment plays each rollout itself, through an OpenAI client whose requests the policy answers, and its
    rubric computes the reward. Each function of the rubric is a fact; as in verifiers, an exception counts as 0. The
    verdict is "correct" from the environment's `pass_threshold` on.

    Without an evaluation dataset, the environment's last `held_out` examples are not trained on. An error of the
    environment fails the episode. An empty answer, and a conversation without room for another answer, are scored by
    the rubric.

    Attributes:
      env: id of an installed environment, "module:function" that returns one, or in Python the environment or function.
      name: selects this environment.
      args: arguments of `load_environment`.
      max_tokens: maximum number of tokens per answer.
      held_out: maximum number of evaluation examples.

    Departures from verifiers: (1) environments with rewards per group are refused; (2) environments of verifiers 0.4
    and later (`verifiers.v1`) are not supported.
    """

    env: Any
    name: Literal["verifiers"] = "verifiers"
    args: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: PositiveInt = 512
    held_out: NonNegativeInt = 64

    plays_itself: ClassVar[bool] = True

    def check(self, model: Any) -> None:
        environment = self._environment()
        check_server()
        self._records(environment)

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        environment = self._environment()
        # An environment without a limit of turns is limited by the tokens, of which each turn has at least one.
        turns = getattr(environment, "max_turns", 0)
        limits = AgentLimits(self.max_tokens, turns if turns > 0 else seq_tokens)
        play = functools.partial(_play, environment)
        return agent_tasks(play, *self._records(environment), limits=limits, policy=policy, seq_tokens=seq_tokens)

    def _environment(self) -> Any:
        """Loads the environment.

        Raises:
          ConfigError: verifiers is not installed or too new, or the environment cannot be loaded or is not supported.
        """
        verifiers = optional_module("verifiers", environment=self.name, extra="verifiers")
        # `hasattr` would import everything that the package has, and fail if a requirement is missing.
        if tuple(map(int, verifiers.__version__.split(".")[:2])) >= (0, 4):
            raise ConfigError(
                f"verifiers {verifiers.__version__} has no load_environment; version 0.3 was the last to have it. "
                f"Install version 0.3: {install_command('stack-rl[verifiers]')}"
            )
        found = _load(self.env, self.args)
        if not isinstance(found, verifiers.MultiTurnEnv):
            raise ConfigError(
                f"{self.env!r} is a {type(found).__name__}; a SingleTurnEnv or MultiTurnEnv of verifiers was expected."
            )
        if found.requires_group_rollouts:
            raise ConfigError(
                f"The rubric of {self.env!r} scores whole groups; only functions of a single rollout are supported."
            )
        return found

    def _records(self, environment: Any) -> tuple[list[Record], list[Record]]:
        """Returns the training and evaluation examples.

        Raises:
          ConfigError: no example remains for training.
        """
        try:
            training = [dict(each) for each in environment.get_dataset()]
        except ValueError as error:
            raise ConfigError(f"{self.env!r} has no training dataset: {error}.") from error
        evaluation: list[dict[str, Any]] = []
        if environment.eval_dataset_source is not None:
            evaluation = [dict(each) for each in environment.get_eval_dataset(self.held_out)] if self.held_out else []
        elif self.held_out:
            if self.held_out >= len(training):
                raise ConfigError(
                    f"{self.env!r} has {len(training)} examples, of which data.environment.held_out: {self.held_out} "
                    "leaves none to train on. Lower it."
                )
            training, evaluation = training[: -self.held_out], training[-self.held_out :]
        return self._named("example", training), self._named("evaluation example", evaluation)

    def _named(self, kind: str, rows: list[dict[str, Any]]) -> list[Record]:
        return [(f"{self.env} {kind} {number}", row) for number, row in enumerate(rows)]


def _load(env: Any, args: Mapping[str, Any]) -> Any:
    """Loads an environment.

    Raises:
      ConfigError: it cannot be loaded.
    """
    import verifiers

    if isinstance(env, verifiers.Environment):
        return env
    if not callable(env) and ":" not in str(env):
        make = functools.partial(verifiers.load_environment, str(env))
    else:
        make = env if callable(env) else import_function(env, label="Environment")
    try:
        with _signal_guard():
            return make(**args)
    except Exception as error:  # environments are user code and may raise any exception
        raise ConfigError(f"verifiers cannot load {env!r}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _signal_guard() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM, which each environment of verifiers replaces."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in handlers.items():
                signal.signal(each, handler)


async def _play(environment: Any, access: AgentAccess, record: Mapping[str, Any]) -> Score:
    """Plays and scores one rollout.

    Raises:
      RuntimeError: the environment failed.
    """
    import httpx
    from openai import AsyncOpenAI

    # By its name, because later versions of verifiers, which `_environment` refuses, lack the module.
    clients = importlib.import_module("verifiers.clients")

    # Without certificates and proxies, because the endpoint is on this machine.
    async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as connection:
        client = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0, http_client=connection)
        output = await environment.run_rollout(record, clients.OpenAIChatCompletionsClient(client), access.model, {})
    error = output.get("error")
    # An empty answer is the policy's, and has been scored by the rubric.
    if error is not None and error["error"] != "EmptyModelResponseError":
        raise RuntimeError(error["error_chain_repr"])
    verdict: Verdict = "correct" if output["reward"] >= environment.pass_threshold else "wrong"
    return Score(value=output["reward"], verdict=verdict, facts=output["metrics"] or {})
