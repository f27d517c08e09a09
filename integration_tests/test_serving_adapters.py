"""Many adapters beside one model: what each request gets, what is compiled, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stack_core.abi.adapters import LowRankFactors
from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConversionError, GenerationError
from stack_core.abi.generation import SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main
from stack_serve import LLM
from stack_serve.llm.speculation import Speculation
from stack_train.peft.writing import write_peft
from stack_train.run.config import run_config

from .generation import Reference
from .test_peft import factors, made_run

PROMPT = [3, 5, 7, 9, 11, 2, 4, 6, 8]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
SIZES = {"max_sequences": 3, "step_tokens": 12, "max_tokens": 24, "page_tokens": 4}


def written(directory: Path, base: Path, **settings: Any) -> str:
    directory.mkdir()
    config = run_config(base).model
    write_peft(directory, factors(config, **settings), config, base=None, digests={})
    return str(directory)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "twice": written(root / "twice", base, rank=4, scale=2.0),
        "against": written(root / "against", base, rank=3, scale=-3.0),
        "strong": written(root / "strong", base, rank=2, scale=6.0),
    }


@pytest.fixture(scope="module")
def llm(base: Path, adapters: dict[str, str]) -> Any:
    with LLM(base, adapters=adapters, max_adapters=2, **SIZES) as found:
        found.warm_up()
        yield found


def answer(llm: LLM, adapter: str | None) -> tuple[int, ...]:
    return llm.generate(PROMPT, GREEDY, adapter=adapter)[0].outputs[0].token_ids


def reference_of(address: str) -> Reference:
    return Reference(open_for_generation(address))


def compiled(llm: LLM) -> int:
    return llm._engine.stats().compilations


def test_an_answer_does_not_depend_on_the_others_adapters(llm, base):
    names = (None, "twice", "against", "strong")
    alone = {name: answer(llm, name) for name in names}
    assert len(set(alone.values())) == 4
    # Three adapters in turn on the two places of adapters, and with others' pages of the same prompt kept.
    order = [*names, *reversed(names)]
    mixed = llm.generate([PROMPT] * 8, GREEDY, adapter=order)
    assert [each.outputs[0].token_ids for each in mixed] == [alone[name] for name in order]
    assert compiled(llm) == 0
    reference_of(str(base)).assert_most_likely(PROMPT, alone[None], tolerance=1e-4)


def test_what_is_served_is_what_is_merged(llm, base, tmp_path):
    written(tmp_path / "peft", base, rank=4, scale=2.0)
    main(["convert", f"peft:{tmp_path}/peft", str(tmp_path / "run"), "--base", str(base)])
    main(["convert", str(tmp_path / "run"), f"hf:{tmp_path}/merged"])
    reference_of(f"hf:{tmp_path}/merged").assert_most_likely(PROMPT, answer(llm, "twice"), tolerance=1e-4)


@pytest.mark.slow  # compiles another engine and its draft model
def test_drafts_are_verified_with_the_adapter_of_their_row(llm, base, adapters, monkeypatch):
    """The draft model has no adapters, so only the drafts of the base model are sure to be accepted."""
    monkeypatch.setattr(Speculation, "_cost", lambda *_: 1e-9)  # drafts always pay
    monkeypatch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
    monkeypatch.setattr(Speculation, "_drafting_cost", lambda *_: 0.0)
    sampling = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    order = ["twice", None, "against", "twice"]
    drafts = {"speculation": {"method": "draft", "tokens": 3}, "draft_model": str(base)}
    with LLM(base, adapters=adapters, **drafts, **SIZES) as drafting:
        found = drafting.generate([PROMPT] * 4, sampling, adapter=order)
        stats = drafting._engine.stats()
        assert 5 < stats.accepted_tokens < stats.drafted_tokens
    expected = llm.generate([PROMPT] * 4, sampling, adapter=order)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert len({each.outputs[0].token_ids for each in expected}) == 3


def test_adapters_come_and_go_while_it_serves(llm, base, tmp_path):
    before = answer(llm, "twice")
    llm.load_adapter("new", written(tmp_path / "new", base, rank=4, scale=-6.0))
    config = run_config(base).model
    first = answer(llm, "new")
    llm.load_adapter("new", factors(config, rank=4, scale=2.0))  # replaced: what was kept of its prompts is not used
    assert answer(llm, "new") == before != first
    llm.unload_adapter("new")
    with pytest.raises(GenerationError, match="There is no adapter 'new'"):
        answer(llm, "new")
    assert answer(llm, "twice") == before and compiled(llm) == 0


def test_what_does_not_fit_is_refused(llm, base, tmp_path):
    config = run_config(base).model
    path, one = next(iter(factors(config, rank=2).items()))
    for given, message in (
        (factors(config, rank=5), "has rank 5; the engine was started for 4. .*adapter_rank=5"),
        ({path.replace("query", "key"): one}, "attention/key/kernel, which had no adapter"),
        ({path: dataclasses.replace(one, magnitude=np.ones((2, 32)))}, r"has magnitudes \(DoRA\), which cannot"),
    ):
        with pytest.raises(GenerationError, match=message):
            llm.load_adapter("bad", given)
    other = written(tmp_path / "other", made_run(tmp_path / "wider", embed=64))
    with pytest.raises(ConversionError, match=r"lora_A.weight has shape \(4, 64\); expected \(4, 32\)"):
        llm.load_adapter("bad", other)
    with pytest.raises(GenerationError, match=r"no adapter 'twise'. Did you mean 'twice'"):
        answer(llm, "twise")
    with LLM(base, **SIZES) as plain, pytest.raises(GenerationError, match="started without adapters"):
        plain.load_adapter("late", factors(config))


def mixture_run(directory: Path) -> Any:
    sizes = {"layers": 1, "experts": 4, "active_experts": 2, "expert_mlp": 16}
    return open_for_generation(str(made_run(directory, name="qwen3_moe", **sizes)))


def test_adapters_of_experts_are_refused(tmp_path):
    """The rows of an expert stand in another order than the tokens."""
    factors = LowRankFactors(np.zeros((1, 4, 32, 2)), np.zeros((1, 4, 2, 16)), 1.0)
    path = "blocks/0/0/feed_forward/expert_up"
    reads = dataclasses.replace(mixture_run(tmp_path / "run"), adapters_at=lambda _: {path: factors})
    with pytest.raises(GenerationError, match="has 2 axes of layers and experts, which cannot be served"):
        LLM(reads, adapters={"mine": "anywhere"}, **SIZES)


def test_an_adapter_of_a_router_is_that_of_the_merged_router(tmp_path):
    rng = np.random.default_rng(0)
    down, up = (rng.normal(size=size).astype(np.float32) for size in ((1, 32, 2), (1, 2, 4)))
    factors, path = LowRankFactors(down, up, 50.0), "blocks/0/0/feed_forward/router/kernel"
    base = mixture_run(tmp_path / "run")

    def merged(shardings: Any) -> Any:
        for place, value in base.read(shardings):
            is_router = "/".join(map(str, place)) == path
            yield place, value + 50 * np.einsum("lir,lro->lio", down, up) if is_router else value

    prompts, sampling = [[1, 2, 3, 4], [5, 6, 7, 8, 9]], SamplingParams(max_tokens=8, temperature=0.0)

    def answers(llm: LLM, **options: Any) -> list[Any]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling, **options)]

    reads = dataclasses.replace(base, adapters_at=lambda _: {path: factors})
    with LLM(reads, adapters={"mine": "anywhere"}, **SIZES) as llm:
        adapted, plain = answers(llm, adapter="mine"), answers(llm)
    assert adapted != plain
    reference = Reference(dataclasses.replace(base, read=merged))
    for prompt, tokens in zip(prompts, adapted, strict=True):
        reference.assert_most_likely(prompt, tokens, tolerance=1e-4)


def test_an_engine_of_adapters_is_an_engine(llm):
    assert isinstance(llm._engine, Engine)
