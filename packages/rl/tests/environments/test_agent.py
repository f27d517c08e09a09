"""Agents that play episodes through the openai client: what is kept of them, and what is refused or fails."""

import asyncio
import json
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest

from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import EnvironmentKind, Score, Tasks
from stack_rl.environments.agent import AgentConfig
from stack_rl.episodes import Attempt, Player, PolicySampling

from ..scripted import END, Letters, Policy, ScriptedEngine

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\x00\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SEQ_TOKENS = 200


def client_of(access, kind=openai.OpenAI):
    return kind(base_url=access.base_url, api_key=access.api_key, max_retries=0)


def ask(client, access, messages, **options):
    answer = client.chat.completions.create(model=access.model, messages=messages, **options)
    return answer.choices[0].message, answer


def two_turns(access, record):
    """Asks twice; the second request holds the first one's answer as the client gave it."""
    with client_of(access) as client:
        messages = [{"role": "user", "content": record["prompt"]}]
        first, _ = ask(client, access, messages, max_tokens=9)
        second, whole = ask(client, access, [*messages, first, {"role": "user", "content": "sure?"}])
        assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens == len(second.content) + 1
        return Score(value=float(len(second.content)), verdict="correct", facts={"first": float(len(first.content))})


async def two_turns_at_once(access, record):
    """The same by the asynchronous client."""
    async with client_of(access, openai.AsyncOpenAI) as client:
        messages = [{"role": "user", "content": record["prompt"]}]
        first = await client.chat.completions.create(model=access.model, messages=messages, max_tokens=9)
        messages += [first.choices[0].message, {"role": "user", "content": "sure?"}]
        second = await client.chat.completions.create(model=access.model, messages=messages)
        return len(second.choices[0].message.content)


def scripted(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return (*map(ord, "yes" if len(prompt) > 30 else "five"), END)


def tasks_of(tmp_path, agent, **fields):
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": "2+3?"}))
    config = AgentConfig(agent=agent, source=str(records), **fields)
    assert isinstance(config, EnvironmentKind)
    config.check(None)
    tasks = config.build(Policy(tokenizer=Letters(), chat_template=TEMPLATE), seq_tokens=SEQ_TOKENS, seed=0)
    assert isinstance(tasks, Tasks)
    return tasks


def play(tmp_path, agent, *, on_failure="stop", attempts=1, answer=scripted, **fields):
    tasks, engine = tasks_of(tmp_path, agent, **fields), ScriptedEngine(answer)
    player = Player(tasks, engine, seq_tokens=SEQ_TOKENS, on_failure=on_failure, timeout_s=60.0)
    return player.play([Attempt(0, 0)] * attempts, seed=(1,), greedy=False), engine


@pytest.mark.parametrize("agent", [two_turns, two_turns_at_once])
def test_every_token_that_an_agent_got_is_kept_as_it_was_drawn(tmp_path, agent):
    found, engine = play(tmp_path, agent, attempts=24)  # more at once than a pool of threads has
    assert [each.sampling.max_tokens for each in engine.requests[:1]] == [9]
    for each in found:
        drawn = [chr(token) for token in each.tokens[each.sampled]]
        assert "".join(drawn) == "five\x00yes\x00"
        whole = "<user>2+3?\x00\n<assistant>five\x00\n<user>sure?\x00\n<assistant>yes\x00"
        assert "".join(map(chr, each.tokens)) == whole
        np.testing.assert_array_equal(each.logprobs, np.where(each.sampled, -1, 0))
        np.testing.assert_array_equal(each.versions, np.where(each.sampled, 0, -1))
        assert (each.rewards.sum(), each.rewards[-1], each.facts["turns"]) == (3, 3, 2)
    if agent is two_turns:
        assert {(each.verdict, each.facts["first"]) for each in found} == {("correct", 4)}


def test_episodes_that_are_played_ahead_have_agents_too(tmp_path):
    engine = ScriptedEngine(scripted)
    engine.submit = lambda request, receive: (
        ScriptedEngine.submit(engine, request) or list(map(receive, engine.stream(request.request_id)))
    )
    player = ConcurrentPlayer(
        tasks_of(tmp_path, two_turns), engine, seq_tokens=SEQ_TOKENS, seed=0, on_failure="stop", timeout_s=60.0,
        policy_sampling=PolicySampling(),
    )  # fmt: skip
    done, failed = [], []
    player.begin([Attempt(0, 0)] * 3, done.append, failed.append)
    for _ in range(2000):
        if done or failed:
            break
        asyncio.run(asyncio.sleep(0.01))
    player.close()
    assert not failed and [each.rewards.sum() for each in done[0]] == [3, 3, 3]


def test_an_agent_that_fails_has_no_reward(tmp_path):
    def raising(access, record):
        if raising.calls:
            with client_of(access) as client:
                ask(client, access, [{"role": "user", "content": "x?"}])
        raise ConnectionError("the database is gone")

    def nothing(access, record):
        with client_of(access) as client:
            ask(client, access, [{"role": "user", "content": "x?"}])

    for raising.calls in (0, 1):
        with pytest.raises(EnvironmentFailed, match="the agent raised ConnectionError: the database is gone"):
            play(tmp_path, raising)
        assert play(tmp_path, raising, on_failure="drop")[0] == [None]
    with pytest.raises(EnvironmentFailed, match="returned None; a number or a Score"):
        play(tmp_path, nothing)
    with pytest.raises(EnvironmentFailed, match=r"returned 1\.0 before its first request"):
        play(tmp_path, lambda access, record: 1.0)
    with pytest.raises(EnvironmentFailed, match="reward is nan"):
        play(tmp_path, lambda access, record: two_turns(access, record).value * float("nan"))


def test_a_request_that_is_no_continuation_fails(tmp_path):
    def other_history(access, record):
        with client_of(access) as client:
            messages = [{"role": "user", "content": record["prompt"]}]
            ask(client, access, messages)
            ask(client, access, [*messages, {"role": "assistant", "content": "six"}, *messages])

    with pytest.raises(EnvironmentFailed, match=r"message 1 was.*five.*and is.*six"):
        play(tmp_path, other_history)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "'temperature' is 0.5. Leave it out"),
        ({"stream": True}, "'stream' is True"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools' is"),
        ({"max_tokens": 0}, "'max_tokens' is 0"),
        ({"model": "gpt-5"}, "'model' is 'gpt-5'; the only one here is 'policy'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "A message"),
        ({"messages": []}, "at least one message"),
    ],
)
def test_what_an_episode_cannot_have_is_refused(tmp_path, options, message):
    def asking(access, record):
        plain = {"model": access.model, "messages": [{"role": "user", "content": record["prompt"]}]}
        with client_of(access) as client:
            assert [each.id for each in client.models.list()] == [access.model]
            client.chat.completions.create(**{**plain, **options})

    with pytest.raises(EnvironmentFailed, match="the agent raised BadRequestError") as caught:
        play(tmp_path, asking)
    assert message in str(caught.value)


def test_a_conversation_without_room_is_truncated_and_no_failure(tmp_path):
    def endless(access, record):
        with client_of(access) as client:
            messages = [{"role": "user", "content": record["prompt"]}]
            while True:
                try:
                    answer, _ = ask(client, access, messages)
                except openai.BadRequestError as error:
                    endless.codes.append(error.code)
                    if endless.gives_up:
                        return 0.25
                    raise
                messages += [answer, {"role": "user", "content": "go on?"}]

    for endless.gives_up, reward in ((True, 0.25), (False, 0.0)):
        for fields, code in (({}, "context_length_exceeded"), ({"most_turns": 3}, "turns_exceeded")):
            endless.codes = []
            (found,), _ = play(tmp_path, endless, **fields)
            assert endless.codes == [code] and found.rewards.sum() == reward
            assert found.is_truncated == (not fields) and len(found.tokens) < SEQ_TOKENS
            assert found.facts["turns"] == (3 if fields else 6)


def test_the_endpoint_knows_its_clients_by_their_keys_and_is_gone_afterwards(tmp_path):
    def curious(access, record):
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x?"}]}).encode()
        statuses = []
        for path, key, data in (
            ("chat/completions", "another", body),
            ("embeddings", access.api_key, body),
            ("chat/completions", access.api_key, b"{"),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            try:
                urllib.request.urlopen(urllib.request.Request(f"{access.base_url}/{path}", data, headers), timeout=10)
            except urllib.error.HTTPError as error:
                statuses.append(error.code)
                error.close()
        curious.access = access
        return two_turns(access, record).value if statuses == [401, 404, 400] else float("nan")

    (found,), _ = play(tmp_path, curious)
    assert found.rewards.sum() == 3
    with pytest.raises(openai.APIConnectionError):
        two_turns(curious.access, {"prompt": "x"})


def test_an_agent_that_cannot_be_imported_is_refused(tmp_path):
    for agent, message in (("nowhere:agent", "cannot be imported"), ("math:pi", "is not a function")):
        with pytest.raises(ConfigError, match=message):
            tasks_of(tmp_path, agent)
