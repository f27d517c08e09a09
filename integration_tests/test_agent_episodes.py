"""Agents that play episodes through the openai client and stack-serve: records, refusals and failures."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, TokenLogprob
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import EnvironmentKind, Score, Tasks
from stack_rl.environments.agent import AgentConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.experience import batch_of, batch_shapes
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.packing import PackedRows
from stack_rl.sampling import PolicySampling

END, SEQ_TOKENS = 0, 200
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    """{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", """
    """"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}\x00\n{% endfor %}"""
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "look", "arguments": {"cell": 3}}</tool_call>'
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Letters:
    """A tokenizer of characters, except that a prompt's "sixth" is one token, which the policy never samples."""

    vocab_size, eos_id, bos_id = 200, END, 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text.replace("sixth", chr(199))))

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        return [np.asarray(self.encode(text)) for text in texts]

    def save(self, directory: Path) -> None: ...

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each) for each in ids if each > 1).replace(chr(199), "sixth")

    def token_bytes(self, token: int) -> bytes:
        return b"sixth" if token == 199 else chr(token).encode()


class Policy:
    """A `GenerativeCheckpoint` without weights."""

    tokenizer, chat_template, special_tokens = Letters(), TEMPLATE, {}
    end_tokens, sampling_defaults = frozenset({END}), {"temperature": 0.3}
    name, vocab_size, max_positions, parameters, states = "scripted", 200, 4096, (), ()

    def load_params(self, shardings: Any = None) -> Any: ...

    def model(self, params: Any) -> Any: ...

    def shardings(self, mesh: Any) -> Any: ...


class ScriptedEngine(Engine):
    """Continues a prompt's text by `answer`, one token per update. All log-probabilities are -1."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self._answer = answer

    def start(self) -> None: ...

    def close(self, *, drain_s: float = 0.0) -> None: ...

    def submit(self, request: GenerationRequest, receive: Any = None) -> None:
        self.requests.append(request)
        for update in self.stream(request.request_id) if receive else ():
            receive(update)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        (request,) = (each for each in self.requests if each.request_id == request_id)
        whole = [*map(ord, self._answer(Letters().decode(request.prompt))), END]
        tokens = whole[: request.sampling.max_tokens]
        for index in range(request.sampling.n):
            for place, token in enumerate(tokens):
                is_last = place == len(tokens) - 1
                yield GenerationUpdate(
                    request_id=request_id,
                    index=index,
                    tokens=(token,),
                    text="" if token == END else chr(token),
                    logprobs=(TokenLogprob(token, -1.0, 1),),
                    weights_versions=(0,),
                    finish_reason=("stop" if tokens == whole else "length") if is_last else None,
                )

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def update_weights(self, params: Any, *, version: Any = None, kv: Any = "keep", donate: bool = False) -> None: ...

    def stats(self) -> Any:
        raise NotImplementedError


def scripted(prompt: str) -> str:
    return "yes" if len(prompt) > 30 else "five"


def client_of(access, kind=openai.OpenAI):
    return kind(base_url=access.base_url, api_key=access.api_key, max_retries=0)


def ask(client, access, messages, **options):
    answer = client.chat.completions.create(model=access.model, messages=messages, **options)
    return answer.choices[0].message, answer


def user(text):
    return {"role": "user", "content": text}


def two_turns(access, record):
    """Asks twice; the second request holds the first one's answer as the client gave it."""
    with client_of(access) as client:
        messages = [user(record["prompt"])]
        first, _ = ask(client, access, messages, max_tokens=9)
        second, whole = ask(client, access, [*messages, first, user("sure?")])
        assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens == len(second.content) + 1
        return Score(value=float(len(second.content)), verdict="correct", facts={"first": float(len(first.content))})


async def two_turns_at_once(access, record):
    """The same by the asynchronous client, and as a stream."""
    async with client_of(access, openai.AsyncOpenAI) as client:
        messages = [user(record["prompt"])]
        first = await client.chat.completions.create(model=access.model, messages=messages, max_tokens=9)
        messages += [first.choices[0].message, user("sure?")]
        stream = await client.chat.completions.create(model=access.model, messages=messages, stream=True)
        return len("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))


def tasks_of(tmp_path, agent, **fields):
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": "2+3?"}))
    config = AgentConfig(agent=agent, source=str(records), **fields)
    assert isinstance(config, EnvironmentKind)
    config.check(None)
    tasks = config.build(Policy(), seq_tokens=SEQ_TOKENS, seed=0)
    assert isinstance(tasks, Tasks)
    return tasks


def play(
    tmp_path,
    agent,
    *,
    on_failure="stop",
    attempts=1,
    answer=scripted,
    greedy=False,
    sampling=PolicySampling(),  # noqa: B008, frozen
    **fields,
):
    tasks, engine = tasks_of(tmp_path, agent, **fields), ScriptedEngine(answer)
    player = Player(
        tasks, engine, seq_tokens=SEQ_TOKENS, on_failure=on_failure, timeout_s=60.0, policy_sampling=sampling
    )
    return player.play([Attempt(0, 0)] * attempts, seed=(1,), greedy=greedy), engine


def branches(trajectory):
    """The text of each branch, with the policy's tokens in brackets."""
    ends = [*trajectory.branch_starts[1:], len(trajectory.tokens)]
    found = []
    for first, end in zip(trajectory.branch_starts, ends, strict=True):
        text, was = "", False
        for token, sampled in zip(trajectory.tokens[first:end], trajectory.sampled[first:end], strict=True):
            text += ("[" if sampled and not was else "]" if was and not sampled else "") + chr(token)
            was = sampled
        found.append((text + ("]" if was else "")).replace("\x00", "$").replace("\n", ""))
    return found


@pytest.mark.parametrize("agent", [two_turns, two_turns_at_once])
def test_every_token_that_an_agent_got_is_kept_as_it_was_drawn(tmp_path, agent):
    found, engine = play(tmp_path, agent, attempts=24)  # more at once than a pool of threads has
    assert [each.sampling.max_tokens for each in engine.requests[:1]] == [9]
    assert len({each.sampling.seed for each in engine.requests}) == 48
    assert {each.sampling.temperature for each in engine.requests} == {1.0}  # the run's, not the checkpoint's
    for each in found:
        assert branches(each) == ["<user>2+3?$<assistant>[five$]<user>sure?$<assistant>[yes$]"]
        np.testing.assert_array_equal(each.logprobs, np.where(each.sampled, -1, 0))
        np.testing.assert_array_equal(each.versions, np.where(each.sampled, 0, -1))
        assert (each.rewards.sum(), each.rewards[-1], each.facts["turns"], each.facts["branches"]) == (3, 3, 2, 1)
    if agent is two_turns:
        assert {(each.verdict, each.facts["first"]) for each in found} == {("correct", 4)}


def test_episodes_that_are_played_ahead_have_agents_too(tmp_path):
    player = ConcurrentPlayer(
        tasks_of(tmp_path, two_turns), ScriptedEngine(scripted), seq_tokens=SEQ_TOKENS, seed=0, on_failure="stop",
        timeout_s=60.0, policy_sampling=PolicySampling(),
    )  # fmt: skip
    done, failed = [], []
    player.begin([Attempt(0, 0)] * 3, done.append, failed.append)
    for _ in range(2000):
        if done or failed:
            break
        asyncio.run(asyncio.sleep(0.01))
    player.close()
    assert not failed and [each.rewards.sum() for each in done[0]] == [3, 3, 3]


def test_conversations_are_branches_and_rows_of_training_are_their_segments(tmp_path):
    async def several(access, record):
        async with client_of(access, openai.AsyncOpenAI) as client:
            create = client.chat.completions.create
            first = await create(model=access.model, messages=[user("a?")])
            said = first.choices[0].message.content
            # Two continuations of one answer, of which the second repeats it as its client would tokenize it anew.
            for text in ("b?", "c?"):
                turns = [user("a?"), {"role": "assistant", "content": said}, user(text)]
                await create(model=access.model, messages=turns)
            # Another conversation, at the same time with two choices.
            await asyncio.gather(
                create(model=access.model, messages=[user("d?")], n=2),
                create(model=access.model, messages=[user("e?")]),
            )
            return 1.0

    answers = {"a": "sixth", "b": "one", "c": "two", "d": "x", "e": "y"}
    answer = lambda prompt: answers[prompt[prompt.rindex("?") - 1]]
    # Pending requests reserve room for `max_tokens`.
    (found,), _ = play(tmp_path, several, answer=answer, max_tokens=8)
    branched = branches(found)
    # The sampled letters of "sixth" are nowhere one token.
    assert branched[:2] == [
        "<user>a?$<assistant>[sixth$]<user>b?$<assistant>[one$]",
        "<user>a?$<assistant>sixth$<user>c?$<assistant>[two$]",
    ]
    assert sorted(branched[2:]) == ["<user>d?$<assistant>[x$]"] * 2 + ["<user>e?$<assistant>[y$]"]
    assert found.facts["branches"] == 5 and found.facts["turns"] == 6
    assert found.rewards.nonzero()[0].tolist() == [len(found.tokens) - 1]

    algorithm = GRPOConfig()
    shapes = batch_shapes(2, SEQ_TOKENS, algorithm, temperatures=True)
    batch = batch_of([found, found], shapes=shapes, version=0)
    row = {name: values[0, : len(found.tokens) - 1] for name, values in batch.items() if values.ndim > 1}
    lengths = np.diff([*found.branch_starts, len(found.tokens)])
    np.testing.assert_array_equal(row["segment_ids"], np.repeat(np.arange(5) + 1, lengths)[:-1])
    np.testing.assert_array_equal(row["positions"], np.concatenate([np.arange(each) for each in lengths])[:-1])
    assert (row["targets"] >= 0).sum() == found.sampled.sum()
    packed = PackedRows.plan(batch["segment_ids"][:, :120], ()).pack({"segment_ids": batch["segment_ids"][:, :120]})
    assert packed["segment_ids"].max() == batch["segment_ids"][:, :120].max()  # each fills a row
    halves = batch["segment_ids"][:, :60]
    wide = np.concatenate([halves, np.zeros_like(halves)], axis=1)
    (whole,) = PackedRows.plan(wide, (1,)).pack({"segment_ids": wide})["segment_ids"]
    np.testing.assert_array_equal(whole, [*halves[0], *(halves[1] + halves[0].max())])


def test_tool_calls_are_parsed_and_their_tokens_kept(tmp_path):
    def looking(access, record):
        with client_of(access) as client:
            messages = [user("find it")]
            answer, whole = ask(client, access, messages, tools=[LOOK])
            (call,) = answer.tool_calls
            assert whole.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"cell": 3}
            messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
            final, _ = ask(client, access, messages, tools=[LOOK])
            return float(final.content)

    (found,), _ = play(tmp_path, looking, answer=lambda prompt: "7" if "<tool>" in prompt else CALL)
    assert branches(found) == [f"look;<user>find it$<assistant>[{CALL}$]<tool>7$<assistant>[7$]"]
    assert found.rewards.sum() == 7


def test_sampling_options_reach_the_engine_and_answers_that_cannot_be_trained_are_observations(tmp_path):
    def choosing(access, record):
        with client_of(access) as client:
            for options in ({"temperature": 0.5, "seed": 7, "stop": ["!"]}, {}, {"top_p": 0.5}, {"temperature": 0}):
                ask(client, access, [user(record["prompt"])], **options)
            return 1.0

    run = PolicySampling(temperature=0.8)
    (found,), engine = play(tmp_path, choosing, sampling=run)
    sent = [each.sampling for each in engine.requests]
    assert [each.temperature for each in sent] == [0.5, 0.8, 0.8, 0.0]
    assert (sent[0].seed, sent[0].stop, sent[2].top_p) == (7, ("!",), 0.5)
    assert {each.logprobs_of for each in sent} == {"processed"}
    assert found.facts["untrained_answers"] == 2 and found.sampled.sum() == 10
    batch = batch_of([found], shapes=batch_shapes(1, SEQ_TOKENS, GRPOConfig(), sampling=run), version=0, sampling=run)
    drawn = batch["targets"] >= 0
    np.testing.assert_allclose(batch["temperature"][drawn], [0.5] * 5 + [0.8] * 5)

    (found,), engine = play(tmp_path, choosing, sampling=run, greedy=True)
    assert {(each.sampling.temperature, each.sampling.top_p) for each in engine.requests} == {(0.0, 1.0)}
    assert found.sampled.sum() == 20 and found.facts["untrained_answers"] == 0

    def greedy(access, record):
        with client_of(access) as client:
            ask(client, access, [user("x?")], temperature=0)
        return 1.0

    with pytest.raises(EnvironmentFailed, match="none of its 1 answers can be trained, because each request is greedy"):
        play(tmp_path, greedy)


def test_an_agent_that_fails_has_no_reward(tmp_path):
    def raising(access, record):
        if raising.calls:
            with client_of(access) as client:
                ask(client, access, [user("x?")])
        raise ConnectionError("the database is gone")

    def nothing(access, record):
        with client_of(access) as client:
            ask(client, access, [user("x?")])

    def exits(access, record):
        raise SystemExit(3)

    for raising.calls in (0, 1):
        with pytest.raises(EnvironmentFailed, match="the agent raised ConnectionError: the database is gone"):
            play(tmp_path, raising)
        assert play(tmp_path, raising, on_failure="drop")[0] == [None]
    with pytest.raises(EnvironmentFailed, match="returned None; a number or a Score"):
        play(tmp_path, nothing)
    with pytest.raises(EnvironmentFailed, match="the agent raised SystemExit: 3"):
        play(tmp_path, exits)
    with pytest.raises(EnvironmentFailed, match=r"returned 1\.0 without an answer"):
        play(tmp_path, lambda access, record: 1.0)
    with pytest.raises(EnvironmentFailed, match="reward is nan"):
        play(tmp_path, lambda access, record: two_turns(access, record).value * float("nan"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 500}, "maximum context length is 200 tokens"),
        ({"model": "gpt-5"}, "The model 'gpt-5' does not exist"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}}, "This engine does not support constraints"),
    ],
)
def test_what_stack_serve_refuses_is_refused_with_its_error(tmp_path, options, message):
    def asking(access, record):
        plain = {"model": access.model, "messages": [user(record["prompt"])]}
        with client_of(access) as client:
            assert [each.id for each in client.models.list()] == [access.model]
            client.chat.completions.create(**{**plain, **options})

    with pytest.raises(EnvironmentFailed, match=r"the agent raised (BadRequest|NotFound)Error") as caught:
        play(tmp_path, asking)
    assert message in str(caught.value)


def test_a_conversation_without_room_is_truncated_and_no_failure(tmp_path):
    def endless(access, record):
        with client_of(access) as client:
            messages = [user(record["prompt"])]
            while True:
                try:
                    answer, _ = ask(client, access, messages)
                except openai.BadRequestError as error:
                    endless.codes.append(error.code)
                    if endless.gives_up:
                        return 0.25
                    raise
                # With other conversations, which share the room, in the last case.
                messages = [user("again?")] if endless.forgets else [*messages, answer, user("go on?")]

    for endless.gives_up, endless.forgets, reward in ((True, False, 0.25), (False, False, 0.0), (False, True, 0.0)):
        for fields, code in (({}, "context_length_exceeded"), ({"max_turns": 3}, "turns_exceeded")):
            endless.codes = []
            (found,), _ = play(tmp_path, endless, **fields)
            assert endless.codes == [code] and found.rewards.sum() == reward
            assert found.is_truncated == (not fields) and len(found.tokens) <= SEQ_TOKENS
            assert found.facts["turns"] == (3 if fields else 6)


def test_the_server_knows_its_clients_by_their_keys_and_is_gone_afterwards(tmp_path):
    def curious(access, record):
        body = json.dumps({"model": "policy", "messages": [user("x?")]}).encode()
        statuses = []
        for path, key, data in (
            ("chat/completions", "another", body),
            ("nothing", access.api_key, body),
            ("chat/completions", access.api_key, b"{"),
        ):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
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
    for agent, message in (("nowhere:agent", "cannot be imported"), ("math:pi", "is a float; a function")):
        with pytest.raises(ConfigError, match=message):
            tasks_of(tmp_path, agent)
