"""Prompts from files: what is read, refused and dropped, and how rewards see an answer."""

import json

import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError, EnvironmentFailed, UnknownName
from stack_rl.contracts import Completion, Score, Tasks
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.environments.records import read_records
from stack_rl.episodes import Attempt, Player
from stack_rl.rewards.functions import characters, exact

from ..scripted import END, Letters, Policy, ScriptedEngine


def sources(tmp_path, *records):
    path = tmp_path / "prompts.jsonl"
    lines = [each if isinstance(each, str | bytes) else json.dumps(each) for each in records]
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else each.encode() for each in lines))
    return str(path)


def play(config, policy=None, answer="42", seq_tokens=20, on_failure="stop"):
    tasks = config.build(policy or Policy(), seq_tokens=seq_tokens, seed=0)
    assert isinstance(tasks, Tasks)
    engine = ScriptedEngine(lambda prompt: (*map(ord, answer), END))
    player = Player(tasks, engine, seq_tokens=seq_tokens, on_failure=on_failure)
    return player.play([Attempt(task, task) for task in range(tasks.training or 0)], seed=(0,), greedy=False)


def half(completion: Completion) -> float:
    return 0.5


async def later(completion: Completion) -> Score:
    return Score(value=2.0, verdict="unparsed", facts={"length": float(len(completion.text))})


def fails(completion: Completion) -> float:
    raise ZeroDivisionError("no denominator")


def nan(completion: Completion) -> float:
    return float("nan")


def test_an_answer_is_scored_by_the_weighted_rewards(tmp_path):
    source = sources(tmp_path, {"prompt": "6*7=", "answer": 42}, "", {"prompt": "40+1=", "answer": "41"})
    rewards = ("exact", {"reward": "characters", "weight": 0.5}, {"reward": half, "weight": -1}, later)
    first, second = play(PromptsConfig(source=source, rewards=rewards))
    assert first.tokens.tolist() == [1, *map(ord, "6*7=42"), END] and first.sampled.sum() == 3
    assert first.rewards.tolist()[-1] == 1 + 0.5 - 0.5 + 2 and second.rewards.sum() == 0.25 - 0.5 + 2
    assert first.facts == {"exact": 1.0, "characters": 1.0, "half": 0.5, "later": 2.0, "length": 2.0}
    assert (first.verdict, second.verdict) == ("correct", "wrong")


def test_an_answer_that_a_limit_cut_is_not_right(tmp_path):
    config = PromptsConfig(source=sources(tmp_path, {"prompt": "6*7=", "answer": 42}), rewards=("exact",), max_tokens=2)
    (cut,) = play(config)
    assert cut.tokens.tolist()[-2:] == [ord("4"), ord("2")] and cut.verdict == "wrong"


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(tmp_path):
    source = sources(tmp_path, {"prompt": "6*7=", "answer": 42})
    config = PromptsConfig(source=source, rewards=("exact",), stop=("\n",))
    (episode,) = play(config, answer="42\n7*7=49")
    assert episode.tokens.tolist()[-3:] == [*map(ord, "42\n")] and episode.verdict == "correct"
    with pytest.raises(DataError, match=r"data.environment.stop: the tokenizer encodes '\\n\\n' as 2 tokens"):
        play(PromptsConfig(source=source, rewards=("exact",), stop=("\n\n",)))


def test_the_penalty_on_long_answers_is_refused_with_its_new_place(tmp_path):
    source = sources(tmp_path, {"prompt": "6*7=", "answer": 42})
    settings = {"name": "prompts", "source": source, "rewards": ["exact"], "overlong_tokens": 2}
    with pytest.raises(ConfigError, match=r"'overlong_tokens' any more: it is now objective.overlong"):
        parse(PromptsConfig, settings)


@pytest.mark.parametrize(("text", "share"), [("42", 1), ("43", 0.5), ("421", 2 / 3), ("", 0), (" 42 ", 1)])
def test_characters_count_at_their_place(text, share):
    completion = Completion(prompt="", text=text, tokens=(), is_finished=True, record={"answer": "42"})
    assert characters(completion) == pytest.approx(share)
    assert exact(completion).value == (share == 1)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (fails, r"prompts.jsonl:1 failed: .*reward 'fails' raised ZeroDivisionError: no denominator"),
        (nan, r"prompts.jsonl:1 failed: .*reward 'nan' returned nan for '42'"),
        ("exact", r"prompts.jsonl:1 failed: .*reward 'exact' raised KeyError: .*no 'answer'.*other fields: 'key'"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_sample_or_drops_it(tmp_path, reward, message):
    config = PromptsConfig(source=sources(tmp_path, {"prompt": "6*7=", "key": 1}), rewards=(reward,))
    with pytest.raises(EnvironmentFailed, match=f"(?s){message}.*6\\*7=42"):
        play(config)
    assert play(config, on_failure="drop") == [None]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:1: the line is not JSON"),
        ('{"question": "x"}', "prompts.jsonl:1 has no 'prompt'"),
        ("[1]", "prompts.jsonl:1: the line holds a list"),
        (b"\xff", "prompts.jsonl:1' is not UTF-8 text: byte 0 is 0xff"),
        ('{"prompt": "a\\ud83d"}', "prompts.jsonl:1: field 'prompt' has half a surrogate pair at 1"),
        ("[" * 100_000, "prompts.jsonl:1: the line's lists and objects are nested too deeply"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        PromptsConfig(source=sources(tmp_path, line), rewards=("exact",)).check(None)


def test_a_string_may_hold_ends_of_lines_that_json_has_not(tmp_path):
    source = sources(tmp_path, json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False), {"prompt": "d"})
    assert [fields["prompt"] for _, fields in read_records(source, "source")] == ["a\u2028b\x85c", "d"]


def test_what_is_not_there_is_named(tmp_path):
    source = sources(tmp_path, {"prompt": "x"})
    with pytest.raises(DataError, match=r"data.environment.source is 'nowhere/\*'"):
        PromptsConfig(source="nowhere/*", rewards=("exact",)).check(None)
    with pytest.raises(UnknownName, match="Did you mean 'exact'"):
        PromptsConfig(source=source, rewards=("exactly",)).check(None)
    with pytest.raises(ConfigError, match="'math:nothing' cannot be imported"):
        PromptsConfig(source=source, rewards=("math:nothing",)).check(None)
    with pytest.raises(ConfigError, match="'math:pi' is a float"):
        PromptsConfig(source=source, rewards=("math:pi",)).check(None)
    for policy, message in ((Policy(tokenizer=None), "run.init_from"), (Policy(end_tokens=frozenset()), "end token")):
        with pytest.raises(DataError, match=message):
            play(PromptsConfig(source=source, rewards=("exact",)), policy)


def test_prompts_longer_than_the_budget_are_refused_or_dropped(tmp_path):
    records = [{"prompt": "x" * length, "answer": ""} for length in (3, 8, 4)]
    config = PromptsConfig(source=sources(tmp_path, *records), rewards=("exact",))
    with pytest.raises(DataError, match=r"prompts.jsonl:2: the prompt has 9 tokens, but data.seq_tokens is 8"):
        play(config, seq_tokens=8)
    dropping = PromptsConfig(source=config.source, rewards=config.rewards, too_long="drop")
    assert len(play(dropping, seq_tokens=8)) == 2


def test_messages_are_rendered_by_the_chat_template(tmp_path):
    source = sources(tmp_path, {"prompt": [{"role": "user", "content": "hi"}], "answer": "42"})
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    (found,) = play(PromptsConfig(source=source, rewards=("exact",)), Policy(chat_template=template))
    assert Letters().decode(found.tokens) == "u:hi;a:42" and found.tokens[0] == ord("u")
    with pytest.raises(DataError, match="no chat template"):
        play(PromptsConfig(source=source, rewards=("exact",)))
