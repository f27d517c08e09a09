"""Runs on rollouts with images: sampler and trainer agree, rows are packed, and resumed runs end like whole ones."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import parse, to_mapping, to_yaml
from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.text.images import expand_images, place_images
from stack_train import RunConfig, build
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.generation.generative import generative_checkpoint
from stack_train.generation.static_engine import StaticEngine
from stack_train.run.resolve import parse_run
from stack_train.run.train import start as start_run
from stack_train.run.train import train
from stack_train.variables.model_variables import stored_values

from .seeing import (
    GRID_TEMPLATE,
    TEMPLATE,
    make_config,
    make_gemma4_config,
    make_grid_config,
    make_model,
    make_row_config,
    make_windowed_config,
    png,
    question,
    write_tokenizer,
)

# Of 24 tokens, these models often sample the image token, 4, which has no features in an answer.
PLAIN_TEMPLATE = TEMPLATE.replace("<img> ", "<pix> ")
FAMILIES = {
    "gemma3_vision": (make_config, TEMPLATE),
    "gemma4_vision": (make_gemma4_config, PLAIN_TEMPLATE),
    "mistral3": (make_row_config, PLAIN_TEMPLATE),
    "qwen2_5_vl": (make_windowed_config, GRID_TEMPLATE),
    "qwen3_vl": (make_grid_config, GRID_TEMPLATE),
}
OPTIMIZER = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.0, "schedule": {"decay": "constant"}}


def picture(number: int) -> bytes:
    """A picture of its own size."""
    height, width = [(24, 24), (12, 30), (20, 7)][number % 3]
    return png(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Returns the run with random weights of a family, to start from."""

    def written(family):
        directory = folder / family
        if directory.exists():
            return directory
        make, template = FAMILIES[family]
        write_tokenizer(directory / "tokenizer", template)
        model = make(initializer_std=0.3)
        mapping = {"output": str(directory), "model": to_mapping(model), "run": {"steps": 1}}
        config = parse(RunConfig, {**mapping, "data": {"name": "text", "source": "stdlib"}})
        with CheckpointStore(directory / "checkpoints") as store:
            store.save_weights(named_leaves(stored_values(make_model(model))).items(), to_yaml(config))
        (directory / "config.yaml").write_text(to_yaml(config))
        return directory

    folder = tmp_path_factory.mktemp("untrained")
    return written


def write_prompts(folder):
    """Writes two prompts with two pictures of different sizes each, one in a file and one in the text."""
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(picture(number))
    records = []
    for number in range(2):
        (message,) = question("which color is it", picture(number + 1))
        content = [{"type": "image_url", "image_url": {"url": f"{number}.png"}}, *message["content"]]
        records.append({"prompt": [{**message, "content": content}], "answer": "red"})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return {"name": "prompts", "source": str(folder / "prompts.jsonl"), "rewards": [variety], "max_tokens": 6}


def variety(completion):
    """The number of different tokens, for rewards that differ."""
    return float(len(set(completion.tokens)))


def config(output, start, environment, *, steps=3, data=None, **sections):
    """A run of GRPO with a divergence from its start."""
    data = {
        "name": "rollouts",
        "environment": environment,
        "groups": 2,
        "group_size": 4,
        "seq_tokens": 64,
        "row_images": 4,
        **(data or {}),
    }
    objective = {"name": "grpo", "kl": 0.1, "kl_estimator": "k2", "entropy": 0.01}
    run = {"steps": steps, "init_from": f"run:{start}", "evaluate_every_steps": 0}
    whole = {"output": str(output), "data": data, "objective": objective, "run": run, "optimizer": OPTIMIZER}
    return parse_run({**whole, "checkpoint": {"every_steps": 2, "keep": 5}, **sections})


def steps_of(output):
    found = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: each for each in found if each["kind"] == "train"}


def digests(output, step):
    manifest = json.loads((output / "checkpoints" / f"{step:08d}" / "manifest.json").read_text())
    return {name: leaf["digest"] for name, leaf in manifest["content"]["leaves"].items()}


def changed(output, step, start):
    """Returns the first part of the paths of parameters that a run has changed, and of those that it has not."""
    ours, theirs = digests(output, step), digests(start, 0)
    # Frozen parameters are not stored again.
    same = {name: ours.get(name) in (None, digest) for name, digest in theirs.items() if name.startswith("params/")}
    top = lambda flag: {name.split("/")[1] for name, is_same in same.items() if is_same is flag}
    return top(False), top(True)


def test_a_packed_run_with_images_agrees_with_its_sampler(start, tmp_path):
    environment, first = write_prompts(tmp_path / "prompts"), start("gemma3_vision")
    run = build(config(tmp_path / "run", first, environment, steps=2, data={"packed": True}))
    packed = keep_batches(run)
    start_run(run)
    steps = steps_of(tmp_path / "run")
    assert max(each["largest_mismatch"] for each in steps.values()) < 1e-4
    # The reference, which is the initial policy, has the images as well.
    assert abs(steps[1]["kl"]) < 1e-10
    assert steps[2]["kl"] > 1e-6
    # Up to two episodes in each row, with two images of 4 tokens each.
    counts = [each["image_counts"][:, 1] for each in packed]
    assert all(len(each) < 8 and each.max() == 4 and each.sum() == 16 for each in counts)
    assert [int(each["image_mask"].sum()) for each in packed] == [64] * 2
    # Sampled image tokens have no features.
    assert all((each["tokens"] == 4).sum() > each["image_mask"].sum() for each in packed)
    parts = {"blocks", "embedding", "lm_head", "norm", "projector", "vision"}
    assert changed(tmp_path / "run", 2, first) == (parts, set())


@pytest.mark.slow  # two runs
def test_a_packed_run_with_images_resumes_bitwise(start, tmp_path):
    environment, first = write_prompts(tmp_path / "prompts"), start("gemma3_vision")
    whole, cut = (config(tmp_path / name, first, environment, data={"packed": True}) for name in ("whole", "cut"))
    train(whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000003")
    train(cut, resume=True)
    names = ("loss", "reward", "grad_norm", "logprob", "mismatch")
    ours, theirs = (steps_of(tmp_path / name)[3] for name in ("cut", "whole"))
    assert [ours[name] for name in names] == [theirs[name] for name in names]
    assert digests(tmp_path / "cut", 3) == digests(tmp_path / "whole", 3)


@pytest.mark.slow  # a run each; the test above has the engine that most families share
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        (family, engine)
        for family in FAMILIES
        for engine in ("static", "llm")
        if (family, engine) != ("gemma3_vision", "static")
    ],
)
def test_engines_and_families_agree_with_the_trainer_and_a_frozen_tower_stays(start, tmp_path, family, engine):
    environment, first = write_prompts(tmp_path / "prompts"), start(family)
    frozen = {"optimizer": {**OPTIMIZER, "groups": {"vision": {"frozen": True}}}}
    # An image of Gemma 4 has up to 70 tokens.
    data = {"engine": engine, "row_images": 2, **({"seq_tokens": 160} if family == "gemma4_vision" else {})}
    run = build(config(tmp_path / "run", first, environment, data=data, **frozen))
    batches = keep_batches(run)
    start_run(run)
    steps = steps_of(tmp_path / "run")
    assert max(each["largest_mismatch"] for each in steps.values()) < 1e-4 and abs(steps[1]["kl"]) < 1e-10
    moved, same = changed(tmp_path / "run", 3, first)
    # The layers of Gemma 4 have scales that are not trained.
    assert same - moved == {"vision"} and {"blocks", "embedding", "norm"} <= moved
    # Without their pixels, the model has other log-probabilities.
    blank = {**batches[0], "pixels": np.zeros_like(batches[0]["pixels"])}
    drawn = blank["targets"] != -100
    ours, theirs = (np.asarray(run.data._policy.score(each)["logprobs"])[drawn] for each in (batches[0], blank))
    assert np.abs(ours - theirs).max() > 1e-2


def test_the_static_engine_continues_prompts_with_images_like_the_model_without_a_cache(tmp_path):
    """Prompts without an image, with one and with two of different sizes, two of them twice, in one batch."""
    write_tokenizer(tmp_path, GRID_TEMPLATE)
    own = make_grid_config(initializer_std=0.5)
    checkpoint = generative_checkpoint(make_model(own), own, name="eyes", tokenizer=tmp_path, origin=None)
    reader, engine = checkpoint.images, StaticEngine(checkpoint)
    engine.expect(6)
    prompts = {}
    for name, numbers in {"two": (0, 1), "none": (), "one": (2,), "same": (0, 1), "other": (1, 0)}.items():
        images = [reader.read(picture(number)) for number in numbers]
        text = f"user {'! <pix> ? ' * len(images)}which color assistant"
        text = expand_images(text, reader, [each.size for each in images])
        tokens = tuple(checkpoint.tokenizer.encode(text, add_special_tokens=False))
        prompts[name] = tokens, place_images(tokens, reader, images)
    sampling = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    for seed, (name, (tokens, images)) in enumerate(prompts.items()):
        # The same seed for equal prompts.
        settings = SamplingParams(**sampling, seed=0 if name == "same" else seed)
        engine.submit(GenerationRequest(request_id=name, prompt=tokens, sampling=settings, images=images))
    engine.start()
    found = {name: next(engine.stream(name)) for name in prompts}
    assert found["two"].tokens == found["same"].tokens != found["other"].tokens

    @jax.jit
    def logprobs_of(params, tokens, shown):
        model = checkpoint.model(params)
        return jax.nn.log_softmax(model.logits(model(tokens, jnp.arange(64)[None], **shown).hidden[0]))

    params, arrays = checkpoint.load_params(), own.image_arrays(2, 64)
    for name, (tokens, images) in prompts.items():
        whole, mask = np.zeros((1, 64), np.int32), np.zeros((1, 64), bool)
        answer = found[name].tokens
        whole[0, : len(tokens) + len(answer)] = *tokens, *answer
        shown = {key: np.zeros((1, *each.shape), each.dtype) for key, each in arrays.items()}
        first = 0
        for number, image in enumerate(images):
            shown["grids"][0, number] = image.grid
            shown["pixels"][0, first : first + len(image.pixels)] = image.pixels
            mask[0, image.start : image.end] = True
            first += len(image.pixels)
        logprobs = logprobs_of(params, whole, {**shown, "image_mask": mask})
        ours = logprobs[np.arange(len(answer)) + len(tokens) - 1, np.asarray(answer)]
        np.testing.assert_allclose([each.logprob for each in found[name].logprobs], ours, atol=1e-4)
    assert any(4 in each.tokens for each in found.values()), "an image token without features"
    with pytest.raises(GenerationError, match=r"Image 1 of 1 has tokens 2 to 5; expected 3 tokens in 0 to 4"):
        image = prompts["one"][1][:1]
        engine.submit(GenerationRequest(request_id="bad", prompt=(1,) * 5, sampling=SamplingParams(), images=image))


def keep_batches(run):
    """Returns a list to which a run's batches are added."""
    kept, take = [], run.data.train_iterator

    def iterator():
        found = take()
        inner = found._take
        found._take = lambda: kept.append(inner()) or kept[-1]
        return found

    run.data.train_iterator = iterator
    return kept
