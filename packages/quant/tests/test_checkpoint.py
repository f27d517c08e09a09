"""`stack quantize` with a model format that is none of ours: it is reached through core alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi import model_formats
from stack_core.abi.errors import ArgumentError, ConversionError
from stack_core.abi.formats import TrainedModel
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import Outputs
from stack_core.ops import Head
from stack_core.ops.building import is_quantized
from stack_quant.errors import QuantError, RuleError
from stack_quant.rules import Rule
from stack_quant.section import QuantConfig

pytest.importorskip("flax", reason="needs flax: install stack-quant[flax]")

from flax import nnx

from stack_quant.checkpoint import quantize, quantize_checkpoint
from stack_quant.commands.quantize import quantize as command
from stack_quant.mixed.types import Budget
from stack_quant.model import quantize_model, report
from stack_quant.sweep import Selection, sweep_checkpoint

VOCAB, EMBED = 32, 16


class Bigrams(nnx.Module):
    """A `LanguageModel` that looks at one token."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.embedding = nnx.Param(jax.random.normal(keys[0], (VOCAB, EMBED)))
        self.lm_head = nnx.Param(jax.random.normal(keys[1], (EMBED, VOCAB)))

    def __call__(self, tokens: Any, positions: Any, segment_ids: Any = None, cache: Any = None) -> Any:
        return Outputs(self.embedding[...][tokens])

    @property
    def states(self) -> Any:
        return ()

    def head(self) -> Head:
        return Head(self.lm_head[...])

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.lm_head[...]


class Trained:
    """A `TrainedModel` of bigrams, which remembers what was saved."""

    def __init__(self, sections: Mapping[str, Any] | None = None) -> None:
        self.model = Bigrams()
        self.sections = sections or {}
        self.saved: list[tuple[Path, Any, Mapping[str, Any]]] = []

    def training_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        while True:
            yield {"tokens": np.arange(8, dtype=np.int32)[None], "positions": np.arange(8, dtype=np.int32)[None]}

    def validation_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        for first in (0, 8, 16):
            yield {name: array + first for name, array in next(self.training_batches()).items()}

    def metrics(self, model: Any, batch: Mapping[str, Any]) -> Metrics:
        logits = model.logits(model(batch["tokens"], batch["positions"]).hidden)
        loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1))
        return {"loss": Metric.mean(loss, jnp.float32(batch["tokens"].size))}

    def save(self, directory: Path, model: Any, sections: Mapping[str, Any]) -> None:
        self.saved.append((directory, model, sections))


class Format:
    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def recognizes(self, directory: Path) -> bool:
        return (directory / "bigrams").exists()

    def open_model(self, directory: Path, *, data: str | None = None) -> Trained:
        return self.trained


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    trained = Trained()
    (tmp_path / "bigrams").touch()
    formats = {"bigrams": Format(trained), "only converts": object()}
    monkeypatch.setattr(model_formats, "registries", SimpleNamespace(model_formats=formats))
    return trained


def test_a_model_is_opened_measured_and_saved_through_the_contract(trained: Trained, tmp_path: Path) -> None:
    assert isinstance(trained, TrainedModel)
    result = quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out")
    ((directory, model, sections),) = trained.saved
    assert directory == tmp_path / "out" and sections["quant"].rules[0].weights == "int8"
    assert is_quantized(model.lm_head.get_value()) and not is_quantized(trained.model.lm_head.get_value())
    losses = [float(trained.metrics(trained.model, batch)["loss"]) for batch in trained.validation_batches()]
    assert result.loss_before == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.loss_after != result.loss_before == pytest.approx(result.loss_after, rel=0.05)
    assert f"targets {result.loss_before:.4f} before" in result._repr_html_()
    assert repr(result).startswith(f"<QuantizedCheckpoint {tmp_path}/out: loss of 24 held-out targets ")
    assert repr(result).endswith(f"; {repr(result.report)[1:]}")
    assert result.targets == 24
    assert result.report.bytes_after < result.report.bytes_before / 2


def test_importance_is_written_by_path_and_overwrites_nothing(trained: Trained, tmp_path: Path, capsys) -> None:
    command(str(tmp_path), importance=True, out=tmp_path / "mine.npz", calibration_batches=2)
    assert "importance of 1 parameters" in capsys.readouterr().out
    with np.load(tmp_path / "mine.npz") as stored:
        expected = np.mean(np.square(trained.model.embedding[...][:8]), 0)
        np.testing.assert_allclose(stored["lm_head"], expected[:, None], rtol=1e-5)
    with pytest.raises(ConversionError, match="not overwritten"):
        command(str(tmp_path), importance=True, out=tmp_path / "mine.npz")
    with pytest.raises(QuantError, match="Leave --recipe, --algorithm out"):
        command(str(tmp_path), importance=True, recipe="w4", algorithm="gptq", out=tmp_path / "other.npz")


def test_activations_that_a_loss_multiplies_with_the_head_are_rounded_too(trained: Trained, tmp_path: Path) -> None:
    by_weights = tmp_path / "weights.yaml"
    by_weights.write_text("rules: [{path: .*, weights: int8}]")
    weights = quantize_checkpoint(str(tmp_path), str(by_weights), tmp_path / "out")
    both = quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out")
    assert weights.loss_after != both.loss_after


def test_a_recipe_has_an_algorithm_for_models_with_a_stream(trained: Trained, tmp_path: Path) -> None:
    quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out", evaluation_batches=0)
    quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out", evaluation_batches=0, algorithm="nearest")
    recipe = tmp_path / "tiles.yaml"
    recipe.write_text("rules: [{path: .*, weights: int4, tile_size: 4, with_stream: gptq}]")
    quantize_checkpoint(str(tmp_path), str(recipe), tmp_path / "out", evaluation_batches=0)
    rules = [sections["quant"].rules[0] for _, _, sections in trained.saved]
    assert [rule.algorithm for rule in rules] == ["smoothquant+hadamard,least=1", "nearest", "gptq"]
    schemes = [model.lm_head.get_value().scheme for _, model, _ in trained.saved]
    assert schemes == ["int8 scaled rotated by 16", "int8", "int4/t4"]


def test_a_model_that_the_default_algorithm_cannot_quantize_is_rounded_with_a_warning(trained, tmp_path: Path) -> None:
    recipe = tmp_path / "blocks.yaml"
    recipe.write_text('rules: [{path: .*, weights: int8, with_stream: "hadamard,least=32"}]')
    with pytest.warns(UserWarning, match="rounded to the nearest, as with --algorithm nearest: .*lm_head.*,least=1"):
        quantize_checkpoint(str(tmp_path), str(recipe), tmp_path / "out", evaluation_batches=0)
    assert trained.saved[0][2]["quant"].rules[0].algorithm is None
    with pytest.raises(RuleError, match="blocks of at least 32 inputs"):
        quantize_checkpoint(str(tmp_path), str(recipe), tmp_path / "out", algorithm="hadamard,least=32")


def test_progress_is_told(trained: Trained, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out", progress=lambda *stage: told.append(stage))
    assert [stage for stage, done, _ in told if done == 0] == [
        "reading the model",
        "reading the data",
        "quantizing",
        "reading the stream",
        "loss before",
        "loss after",
        "writing",
    ]
    assert ("loss after", 2, 3) in told


def test_static_ranges_are_measured_on_so_many_batches_of_the_training_data(trained: Trained, tmp_path: Path) -> None:
    def training_batches() -> Iterator[Mapping[str, np.ndarray]]:
        for first in range(VOCAB - 8):
            yield {
                "tokens": first + np.arange(8, dtype=np.int32)[None],
                "positions": np.arange(8, dtype=np.int32)[None],
            }

    trained.training_batches = training_batches  # pyrefly: ignore
    recipe, told = tmp_path / "static.yaml", list[Any]()
    recipe.write_text("rules: [{path: .*, weights: int8, activations: int8, static_ranges: true}]")
    options = {"calibration_batches": 5, "evaluation_batches": 0, "progress": lambda *stage: told.append(stage)}
    quantize_checkpoint(str(tmp_path), str(recipe), tmp_path / "out", **options)
    ((_, model, _),) = trained.saved
    largest = jnp.abs(trained.model.embedding[...][: 5 + 7]).max()
    assert model.static_ranges["lm_head"]["high"][...].tolist() == [largest]
    assert [stage for stage in told if stage[0] == "reading the stream"] == [
        ("reading the stream", n, 5) for n in range(5)
    ]


def test_what_was_trained_quantized_is_quantized_by_its_rules(trained: Trained, tmp_path: Path) -> None:
    rule = Rule(path=".*", weights="int8", activations="int8", gradients="int8")
    trained.sections = {"quant": QuantConfig(rules=(rule,), method="qt")}
    quantize_checkpoint(str(tmp_path), None, tmp_path / "out", evaluation_batches=0)
    ((_, _, sections),) = trained.saved
    assert sections["quant"] == QuantConfig(rules=(Rule(path=".*", weights="int8", activations="int8"),), method="ptq")


@pytest.mark.parametrize("counts", [{"calibration_batches": 0}, {"evaluation_batches": -1}], ids=str)
def test_numbers_of_batches_are_checked_before_the_model_is_read(counts: dict[str, int], tmp_path: Path) -> None:
    ((name, count),) = counts.items()
    with pytest.raises(ArgumentError, match=f"{name} is {count}; expected a whole number"):
        quantize(tmp_path / "none", "w8a8", **counts)


def test_nothing_is_overwritten(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="out exists already"):
        (tmp_path / "out").mkdir()
        quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out")
    assert not trained.saved


def test_nothing_is_measured_where_nothing_is_held_out(trained: Trained, tmp_path: Path) -> None:
    result = quantize_checkpoint(f"bigrams:{tmp_path}", "w8a8", tmp_path / "out", evaluation_batches=0)
    assert (result.loss_before, result.loss_after, result.targets) == (None, None, 0)
    assert "no held-out targets</p><div>" in result._repr_html_()


def test_every_parameter_that_is_not_finite_is_named(trained: Trained, tmp_path: Path) -> None:
    trained.model.lm_head.set_value(trained.model.lm_head[...].at[1, 2].set(jnp.nan))
    trained.model.embedding.set_value(trained.model.embedding[...].at[0].set(jnp.inf))
    with pytest.raises(QuantError, match=r"  embedding: 16 of 512\n  lm_head: 1 of 512"):
        quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out")
    assert not trained.saved


def test_a_budget_writes_one_rule_per_site_which_quantizes_again_as_before(trained: Trained, tmp_path: Path) -> None:
    budget = Budget("7bits", ("int2/t16", "int4/t16", "int8"))
    result = quantize(str(tmp_path), budget, calibration_batches=2)
    ((directory, model, sections),) = trained.saved
    assert directory == result.destination == tmp_path.with_name(f"{tmp_path.name}-7bits")
    assert result.report.bytes_after <= budget.bytes(2 * VOCAB * EMBED) and set(result.chosen) == {
        "embedding",
        "lm_head",
    }
    again = report(quantize_model(trained.model, sections["quant"].rules, next(trained.training_batches())))
    assert {row.path: row.rule for row in again.parameters} == {"embedding": 0, "lm_head": 1}
    assert [row.scheme for row in again.parameters] == [row.scheme for row in result.report.parameters]
    assert model.lm_head.get_value().scheme == result.chosen["lm_head"].type.removesuffix("/t16")
    trained.sections = sections
    with pytest.raises(QuantError, match=r"trained by rules of its own, which fix the types\. Leave the budget out"):
        quantize_checkpoint(str(tmp_path), budget, tmp_path / "out")
    trained.sections, trained.training_batches = {}, lambda: iter(())  # pyrefly: ignore
    with pytest.raises(QuantError, match="have no training batch, which calibration needs"):
        quantize_checkpoint(str(tmp_path), "w8a8", tmp_path / "out")


def test_an_algorithm_of_a_budget_leaves_tables_without_a_product_rounded(trained: Trained, tmp_path: Path) -> None:
    options: Any = {"algorithm": "gptq", "calibration_batches": 2, "evaluation_batches": 0}
    quantize_checkpoint(str(tmp_path), Budget("5bits", ("int2/t16", "int4/t16")), tmp_path / "out", **options)
    ((_, _, sections),) = trained.saved
    assert [rule.algorithm for rule in sections["quant"].rules] == [None, "gptq"]


def test_a_sweep_lists_every_scheme_by_every_method(trained: Trained, tmp_path: Path) -> None:
    types = ("int4/t4", "nvfp4", "int8")
    selection = Selection(recipes=("w8a8",), types=types, mixed=types, methods=("nearest", "hadamard,least=32"))
    found = sweep_checkpoint(str(tmp_path), tmp_path / "pages" / "sweep.html", selection, calibration_batches=2)
    plain, *rows = found.rows
    losses = [float(trained.metrics(trained.model, batch)["loss"]) for batch in trained.validation_batches()]
    assert plain.loss == pytest.approx(np.mean(losses), rel=1e-5) and plain.parameter_bytes == 2 * VOCAB * EMBED * 4
    schemes = dict.fromkeys(row.scheme for row in rows)
    assert [*schemes][:4] == ["w8a8", "int4/t4 everywhere", "nvfp4 everywhere", "int8 everywhere"]
    assert all(name.startswith("mixed, ") for name in [*schemes][4:]) and len(schemes) > 4
    of_row = {(row.scheme, row.method): row for row in rows}
    assert len(of_row) == len(rows) == 2 * len(schemes)
    model = quantize_model(trained.model, {"path": ".*", "weights": "int8"}, next(trained.training_batches()))
    losses = [float(trained.metrics(model, batch)["loss"]) for batch in trained.validation_batches()]
    row = of_row["int8 everywhere", "nearest"]
    assert row.loss == pytest.approx(np.mean(losses), rel=1e-5) and row.parameter_bytes == report(model).bytes_after
    refused = of_row["int8 everywhere", "hadamard,least=32"]
    assert refused.loss is None and "blocks of at least 32 inputs" in refused.note
    page = (tmp_path / "pages" / "sweep.html").read_text()
    assert page.startswith("<!doctype html>") and "default-src" in page and "<svg" in page
    assert all(name in page for name in schemes) and f"{row.loss:.4f}" in page
    with pytest.raises(ConversionError, match=r"sweep\.html exists already"):
        sweep_checkpoint(str(tmp_path), tmp_path / "pages" / "sweep.html", selection)
    with pytest.raises(QuantError, match=r"has none\. Give other data"):
        sweep_checkpoint(str(tmp_path), tmp_path / "other.html", selection, evaluation_batches=0)
