"""Whole runs on scikit-learn's digits: what they write and sample, how they resume, what they refuse."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.svm import SVC

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.abi.errors import ConfigError, DataError, GenerationError
from stack_core.abi.run_directory import RunDirectory
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.commands.sample import sample
from stack_train.data.kinds.digits import digits
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import ImageSampler, open_run
from stack_train.run.config import RunConfig, run_config
from stack_train.run.program import build_program
from stack_train.run.resolve import parse_run
from stack_train.run.train import train

EXAMPLE = Path(__file__).parents[4] / "examples" / "digits.yaml"
TINY = [
    "model.layers=1",
    "optimizer.schedule.warmup_steps=0",
    "model.heads=2",
    "model.head_dim=8",
    "data.batch_size=16",
    "optimizer.ema_decay=0.5",
]
SHORT = ["run.steps=2", "run.evaluate_every_steps=0", "checkpoint.every_steps=1"]


def config_of(output, *overrides):
    return parse(RunConfig, apply_overrides(load_yaml(EXAMPLE), [f"output={output}", *TINY, *SHORT, *overrides]))


def leaves(config):
    program = build_program(config)
    with CheckpointStore(RunDirectory(Path(config.output)).checkpoints) as store:
        state = store.restore(program.abstract_state).state
    plain = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        state,
    )
    return {name: np.asarray(leaf) for name, leaf in named_leaves(plain).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = config_of(tmp_path_factory.mktemp("digits") / "run")
    assert np.isfinite(train(config).validation_loss)
    return config


def test_images_are_those_of_the_averaged_weights_and_of_their_seed(run):
    opened = open_run(Path(run.output))
    average = leaves(run)["opt_state/average/patches/kernel"]
    np.testing.assert_array_equal(np.asarray(opened.model.patches.kernel[...]), average)
    config = SamplerConfig(steps=3, guidance=2.0, guidance_rescale=0.5)
    images = opened.images([3, 4, 5], config)
    assert images.shape == (3, 8, 8, 1) and images.std() > 0
    assert np.abs(opened.images([3, 4], config).astype(int) - images[:2]).max() <= 1  # another compilation rounds
    assert (opened.images([3, 4], config, seed=1) != images[:2]).any()


def test_the_command_writes_a_grid_and_the_report_shows_it(run, tmp_path, capsys):
    sample(run.output, label=(3,), grid="2x3", out=tmp_path / "grid.png", steps=2)
    with Image.open(tmp_path / "grid.png") as image:
        assert image.size == (3 * 65 - 1, 2 * 65 - 1)
    sample(run.output, grid="1x10", steps=2)
    assert "step-2.png" in capsys.readouterr().out
    report = (Path(run.output) / "report.html").read_text()
    assert "step-2" in report and "data:image/png;base64," in report and "img-src data:" in report


def test_columns_alternate_between_labels_and_more_of_them_go_row_by_row(run, tmp_path, monkeypatch):
    asked = []
    images = ImageSampler.images

    def recorded(self, labels, config, **options):
        asked.append(labels)
        return images(self, labels, config, **options)

    monkeypatch.setattr(ImageSampler, "images", recorded)
    sample(run.output, label=(3, 5), grid="2x4", out=tmp_path / "grid.png", steps=1)
    sample(run.output, label=(3, 5, 7, 9), grid="2x2", out=tmp_path / "grid.png", steps=1)
    assert asked == [[3, 5, 3, 5] * 2, [3, 5, 7, 9]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label": (3, 5, 7), "grid": "1x2"}, ConfigError, "--label is given 3 times, but --grid has 2 images"),
        ({"label": (10,)}, GenerationError, r"labels 0 to 9, not 10"),
        ({"grid": "8"}, ConfigError, "expected rows x columns"),
        ({"steps": 0}, ConfigError, "sampler.steps"),
        ({"embedded_guidance": 2.0}, GenerationError, "takes no guidance as an input"),
        ({"guidance_rescale": 0.5}, ConfigError, "guidance is 1, which adds none"),
    ],
)
def test_what_cannot_be_sampled_is_refused(run, options, error, message):
    with pytest.raises(error, match=message):
        sample(run.output, **options)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.image_size=16", "model.image_size is 16, not 8"),
        ("model.channels=4", "model.channels is 4, not 1"),
        ("model.classes=5", "model.classes is 5, fewer than 10"),
        ("model.patch=3", "not a multiple of patch=3"),
        ("objective.name=causal_lm", "'tokens'"),
    ],
)
def test_a_model_or_an_objective_that_does_not_take_digits_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        train(config_of(tmp_path / "run", override))


@pytest.mark.parametrize(("module", "package"), [("sklearn", "digits"), ("PIL", "images")])
def test_what_is_not_installed_is_named(run, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"\[{package}\]"):
        if module == "PIL":
            sample(run.output, steps=1)
        else:
            digits()


def test_held_out_digits_come_once_and_rows_are_named():
    config = config_of("unused")
    batches = config.data.build(seed=0, model=config.model)
    found = list(batches.validation_batches())
    assert sum(batch["weights"].sum() for batch in found) == len(batches.validation) == round(0.05 * 1797)
    assert batches.describe_rows(np.array([0, -1]))[0].startswith("digit ")
    first = next(batches.train_iterator())
    assert first["images"].min() == -1.0 and first["images"].max() == 1.0


def readable(directory, sampler):
    """How often a classifier of the real digits gives a sample the asked label, and one of samples a held-out digit."""
    config = run_config(directory)
    batches, real = config.data.build(seed=config.run.seed, model=config.model), digits()
    asked = [place % 10 for place in range(1000)]
    samples = open_run(directory).images(asked, sampler).reshape(1000, -1) / 255.0
    pixels = real.pixels.reshape(len(real.pixels), -1) / 255.0
    judge = SVC(gamma=0.05, C=10.0).fit(pixels[batches.training], real.labels[batches.training])
    assert judge.score(pixels[batches.validation], real.labels[batches.validation]) > 0.95
    pupil = SVC(gamma=0.05, C=10.0).fit(samples, asked)
    return judge.score(samples, asked), pupil.score(pixels[batches.validation], real.labels[batches.validation])


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The run of the example, in three minutes on two idle cores."""
    output = tmp_path_factory.mktemp("example") / "run"
    train(parse(RunConfig, apply_overrides(load_yaml(EXAMPLE), [f"output={output}"])))
    return output


@pytest.mark.slow
def test_the_example_makes_digits_that_classifiers_read_and_learn_from(example):
    asked, learned = readable(example, SamplerConfig(steps=20))
    assert asked >= 0.95 and learned >= 0.85, (asked, learned)


def frechet_distance(samples, real):
    """Fréchet distance between the normal distributions of pixels, Heusel et al., 2017 (arXiv:1706.08500)."""
    (mean, covariance), (other, real_covariance) = ((x.mean(0), np.cov(x.T)) for x in (samples, real))
    # The pixels in the corners are always black, which makes both covariances singular.
    product = np.linalg.eigvals(covariance @ real_covariance).real.clip(0.0)
    return np.square(mean - other).sum() + np.trace(covariance + real_covariance) - 2.0 * np.sqrt(product).sum()


@pytest.mark.slow  # 90 CPU-seconds, and the example's
def test_a_student_has_the_digits_of_its_teacher_in_fewer_steps(example, tmp_path):
    settings = [f"output={tmp_path / 'lcm'}", f"run.init_from={example}"]
    train(parse_run(apply_overrides(load_yaml(EXAMPLE.with_name("digits_lcm.yaml")), settings)))
    real = digits().pixels.reshape(-1, 64) / 255.0

    def distance(directory, steps):
        opened = open_run(directory)
        images = opened.images([*range(10)] * 100, opened.sampler.changed({"steps": steps}))
        return frechet_distance(images.reshape(1000, -1) / 255.0, real)

    teacher, student = ({steps: distance(run, steps) for steps in (1, 4)} for run in (example, tmp_path / "lcm"))
    # Few steps of the teacher give digits near the mean of their class: a classifier reads them, but all are alike.
    assert student[1] < 0.75 * teacher[4] and student[4] < 0.8 * teacher[4] < 0.5 * teacher[1], (student, teacher)
    opened = open_run(tmp_path / "lcm")
    assert readable(tmp_path / "lcm", opened.sampler)[0] >= 0.95
