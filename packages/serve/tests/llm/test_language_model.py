"""`from stack_serve import LLM, SamplingParams`."""

import gc
import html
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import stack_serve
from stack_core.abi.errors import ChatTemplateError, ConfigError, EngineBusy, EngineStopped, GenerationError
from stack_core.abi.generation import GenerationRequest
from stack_serve import LLM, SamplingParams
from stack_serve.llm.config import EngineConfig, engine_config

from .test_engine import Words
from .tiny_checkpoint import TinyCheckpoint, random_params

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if quiet %}q{% endif %}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    checkpoint = TinyCheckpoint(tokenizer=Words(), chat_template=TEMPLATE, sampling_defaults={"max_tokens": 3})
    with LLM(checkpoint, max_num_seqs=4, max_num_batched_tokens=16, page_tokens=4, max_waiting=4) as llm:
        yield llm


def test_the_public_names() -> None:
    assert stack_serve.__all__ == ["Completion", "LLM", "Output", "Piece", "SamplingParams"]
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = stack_serve.LMM  # type: ignore[attr-defined]
    code = "import sys, stack_serve.plugin; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, "commands would start late"


def test_settings_may_have_vllms_names() -> None:
    expected = EngineConfig(max_sequences=2, step_tokens=16, max_tokens=8)
    assert engine_config({"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 8}) == expected
    with pytest.raises(ConfigError, match="max_num_seqs is vLLM's name of max_sequences, and both are set"):
        engine_config({"max_num_seqs": 2, "max_sequences": 2})
    with pytest.raises(ConfigError, match=r"Unknown key 'max_num_sequences'.*max_sequences"):
        engine_config({"max_num_sequences": 2})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("abc", "abc"), ([0, 1, 2], None), ([{"role": "user", "content": "abc"}], "abc")],
    ids=["text", "token ids", "messages"],
)
def test_a_prompt_of_each_kind_alone_and_among_others(llm: LLM, prompt: Any, text: str | None) -> None:
    (alone,) = llm.generate(prompt, GREEDY)
    assert (alone.prompt, alone.prompt_token_ids) == (text, (0, 1, 2))
    (completion,) = alone.outputs
    assert len(completion.token_ids) == 6 and completion.finish_reason == "length"
    assert completion.text == Words().decode(completion.token_ids)
    (expected,) = llm.generate("abc", GREEDY)
    first, second = llm.generate([prompt, "xyz"], GREEDY)
    assert first.outputs == alone.outputs == expected.outputs != second.outputs


def test_more_prompts_than_may_wait(llm: LLM) -> None:
    outputs = llm.generate([[number] for number in range(20)], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [(number,) for number in range(20)]
    assert llm.generate([], GREEDY) == []


def test_a_chat_takes_conversations_and_the_text_of_one_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    assert llm.chat("abc", GREEDY) == llm.chat(messages, GREEDY) == llm.generate(messages, GREEDY)
    first, second = llm.chat([messages, [{"role": "user", "content": "xyz"}]], GREEDY)
    assert (first.prompt, second.prompt) == ("abc", "xyz")
    assert f">abc</span>{html.escape(first.text)}</pre>" in first._repr_html_()
    assert first.text == first.outputs[0].text
    for wrong in (["abc", "xyz"], [1, 2]):
        with pytest.raises(GenerationError, match="Use generate to continue a text"):
            llm.chat(wrong, GREEDY)
    assert repr(llm).startswith("<LLM tiny: ")


def test_sampling_of_each_prompt_or_as_the_makers_recommend(llm: LLM) -> None:
    wanted = SamplingParams(max_tokens=2, n=3, seed=1, logprobs=1, prompt_logprobs=0)
    few, many = llm.generate(["ab", "cd"], [wanted, GREEDY])
    assert [completion.index for completion in few.outputs] == [0, 1, 2]
    assert all(len(completion.logprobs or ()) == 2 for completion in few.outputs)
    assert few.prompt_logprobs is not None and few.prompt_logprobs[0] is None and len(few.prompt_logprobs) == 2
    assert many.outputs[0].logprobs is many.prompt_logprobs is None
    assert len(llm.generate("ab")[0].outputs[0].token_ids) == 3


def test_variables_reach_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    assert llm.generate(messages, GREEDY, chat_template_kwargs={"quiet": True})[0].prompt == "abcq"
    with pytest.raises(ChatTemplateError, match="no variable 'loud'"):
        llm.generate(messages, GREEDY, chat_template_kwargs={"loud": True})


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    outputs = llm.generate(["abc", "xyz"], GREEDY)
    pieces = list(llm.stream(["abc", "xyz"], GREEDY))
    for number, output in enumerate(outputs):
        own = [piece for piece in pieces if piece.prompt == number]
        assert "".join(piece.text for piece in own) == output.outputs[0].text
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["length"]


def test_to_leave_a_stream_is_to_end_it(llm: LLM) -> None:
    stream = llm.stream(["abc"] * 9, SamplingParams(max_tokens=40))
    next(stream)
    stream.close()
    llm.generate("abc", GREEDY)
    stats = llm._engine.stats()
    assert stats.running == stats.waiting == 0


def test_a_call_waits_while_others_fill_the_queue(llm: LLM) -> None:
    expected = llm.generate("abc", GREEDY)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    with pytest.raises(EngineBusy):
        for number in itertools.count():
            llm._engine.submit(GenerationRequest(request_id=str(number), prompt=(0,), sampling=long), lambda _: None)
    assert llm.generate("abc", GREEDY) == expected


def test_threads_may_share_it(llm: LLM) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(llm.generate("abc", GREEDY)[0].outputs)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [llm.generate("abc", GREEDY)[0].outputs] * 3


@pytest.mark.parametrize(
    ("prompts", "sampling", "problem"),
    [
        ("", None, "no tokens"),
        ([[]], None, "is not a prompt"),
        (["a", [99]], None, "token 99"),
        (["a", "b"], [GREEDY], "1 SamplingParams were given for 2 prompts"),
        ("a", SamplingParams(max_tokens=100), "max_tokens=100"),
    ],
)
def test_mistakes_are_told_before_anything_runs(llm: LLM, prompts: Any, sampling: Any, problem: str) -> None:
    steps = llm._engine.stats().steps
    for method in (llm.generate, lambda *given: list(llm.stream(*given))):
        with pytest.raises(GenerationError, match=problem):
            method(prompts, sampling)
    assert llm._engine.stats().steps == steps


def test_sampling_parameters_are_keywords_over_the_defaults_of_the_model(llm: LLM) -> None:
    for method in (llm.generate, llm.chat):
        assert method("abc", max_tokens=6, temperature=0.0)[0].outputs == method("abc", GREEDY)[0].outputs
        assert len(method("abc", temperature=0.0)[0].outputs[0].token_ids) == 3
    assert sum(len(piece.token_ids) for piece in llm.stream("abc", max_tokens=5, ignore_eos=True)) == 5
    for settings, problem in (
        ({"max_token": 3}, r"no argument 'max_token'\. Did you mean 'max_tokens'.*The fields of SamplingParams"),
        ({"sampling_params": GREEDY}, r"no argument 'sampling_params'\. Did you mean 'sampling'"),
        ({"sampling": GREEDY, "seed": 3}, "seed and sampling were given. Set all in SamplingParams"),
    ):
        with pytest.raises(GenerationError, match=problem):
            llm.generate("abc", **settings)
    with pytest.raises(ConfigError, match="temperature"):
        llm.generate("abc", temperature="hot")


def test_what_the_model_lacks() -> None:
    with pytest.raises(ConfigError, match="max_sequence"):
        LLM(TinyCheckpoint(), max_sequence=3)
    with LLM(TinyCheckpoint(), max_sequences=1) as bare:
        with pytest.raises(GenerationError, match=r"tiny has no tokenizer\. Give token ids"):
            bare.generate("abc")
        bare._checkpoint = TinyCheckpoint(tokenizer=Words())
        with pytest.raises(GenerationError, match="tiny has no chat template"):
            bare.generate([{"role": "user", "content": "abc"}])
    with pytest.raises(EngineStopped, match="closed"):
        bare.generate([1, 2])


def test_who_is_forgotten_is_closed() -> None:
    llm = LLM(TinyCheckpoint(), max_sequences=1)
    engine = llm._engine
    del llm
    gc.collect()
    with pytest.raises(EngineStopped):
        engine.update_weights(random_params())
