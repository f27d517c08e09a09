"""Importance of the columns of matrices: the mean square of each input of their products, over a stream of batches.

`stack convert RUN gguf:FILE --importance` fits quantized types to it. Rounding errors of a weight change the outputs by
as much as its input is large, so columns with large inputs deserve smaller errors.

Source: llama.cpp's importance matrices (`tools/imatrix`), by Iwan Kawrakow.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import ConversionError
from stack_core.abi.model_formats import open_model
from stack_quant.algorithms.stream import arguments_of
from stack_quant.batch_calls import call_on_batches
from stack_quant.calibration import STREAM_BATCHES, check_batches
from stack_quant.checkpoint import first_batch
from stack_quant.errors import QuantError
from stack_quant.methods import method
from stack_quant.model import call_model, is_nnx_module, split_arguments
from stack_quant.transform.interpreter import Interpreter, ResolvedRules
from stack_quant.transform.layout import Layout
from stack_quant.transform.program import Parameters, trace
from stack_quant.transform.sequential import Product, Replacements, Slice, run_replacing

__all__ = ["MeasuredImportance", "measure_importance", "write_importance"]


@dataclass(frozen=True)
class MeasuredImportance:
    """Result of `measure_importance`.

    Attributes:
      mean_squares: mean squared inputs of each parameter, float32 in its axes, with one entry along those of outputs.
      left: reason why the inputs of a parameter with a product are not known, by path.
    """

    mean_squares: Mapping[str, np.ndarray]
    left: Mapping[str, str]


def measure_importance(model: Any, stream: Iterable[Any], call: Callable[..., Any] | None = None) -> MeasuredImportance:
    """Measures the mean squared inputs of all parameters with a matrix product.

    Args:
      model: an `nnx.Module` or a callable pytree, in floating point.
      stream: batches of one shape, each in the form of the `sample_batch` of `quantize_model`.
      call: as in `quantize_model`.

    Raises:
      QuantError: the stream is empty, or inputs of a product contain NaN or infinities.
      ShapeError: the batches have different shapes.
    """
    calls = [split_arguments(batch) for batch in stream]
    if not calls:
        raise QuantError("Importance is measured over batches of inputs, but the stream is empty. Give data.")
    fn, parameters, taken = call or call_model, None, None
    if is_nnx_module(model):
        from stack_quant.nnx_model import ModuleProgram, plain_module

        program = ModuleProgram.of(plain_module(model), *calls[0], call)
        fn, parameters, taken = program.fn, program.parameters, program.taken
        calls = [(args, taken(kwargs)) for args, kwargs in calls]
    parameters = Parameters.of(model) if parameters is None else parameters
    args, kwargs = calls[0]
    traced = trace(fn, parameters, *args, **kwargs)
    arrays = parameters.arrays
    state = _Squares(arrays)
    new = Replacements(
        wanted=lambda path, _: jnp.issubdtype(arrays[path].dtype, jnp.floating),
        observe=state.observe,
        finish=lambda key: arrays[key[0]][key[1]],
    )
    interpreter = Interpreter(ResolvedRules((), method("ptq")))
    run_replacing(traced, arrays, [arguments_of(call, calls[0]) for call in calls], interpreter, new)
    return state.result(new.refused)


def write_importance(
    source: str,
    destination: Path,
    *,
    data: str | None = None,
    batches: int = STREAM_BATCHES,
    progress: Callable[[str, int, int], None] = lambda stage, finished, total: None,
) -> MeasuredImportance:
    """Measures the importance of a checkpoint over training batches and writes it, a `.npz` file of arrays by path.

    Args:
      source: "DIR" or "FORMAT:DIR".
      destination: file to write, which must not exist.
      data: address of the documents; None uses the model's data.
      batches: number of batches.
      progress: callback with the name of the current stage, its completed steps and its total steps.

    Raises:
      ConversionError: no format recognizes the directory, or `destination` exists.
      QuantError: the data are empty, or inputs contain NaN or infinities.
      StackError: the checkpoint or the data cannot be used.
    """
    check_batches(calibration_batches=batches)
    if destination.exists():
        raise ConversionError(f"{destination} exists already and is not overwritten. Choose a new file.")
    progress("reading the model", 0, 1)
    trained = open_model(source, data=data)
    first_batch(source, trained)
    progress("measuring", 0, 1)
    stream = map(dict, islice(trained.training_batches(), batches))
    found = measure_importance(trained.model, stream, call_on_batches(trained.model))
    progress("writing", 0, 1)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **found.mean_squares)
        partial.replace(destination)
    except OSError as error:
        raise ConversionError(f"{destination} cannot be written: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return found


class _Squares:
    """Sums of squared inputs by slice of a parameter."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self._sums: dict[Slice, tuple[Layout, jax.Array, int]] = {}

    def observe(self, product: Product) -> None:
        """Adds the inputs of one call."""
        squares = jnp.sum(jnp.square(product.inputs.astype(jnp.float32)), axis=1)
        _, sums, rows = self._sums.get(product.key, (None, jnp.zeros_like(squares), 0))
        self._sums[product.key] = (product.layout, sums + squares, rows + product.inputs.shape[1])

    def result(self, reasons: Mapping[str, str]) -> MeasuredImportance:
        mean_squares, left = dict[str, np.ndarray](), dict(reasons)
        for path in dict.fromkeys(path for path, _ in self._sums):
            mine = {index: held for (own, index), held in self._sums.items() if own == path}
            lead = self._arrays[path].shape[: len(next(iter(mine)))]
            if path not in left and len(mine) != np.prod(lead, dtype=int):
                left[path] = "no batch of the stream reached all of its products"
            if path in left:
                continue
            each = [
                _in_axes(layout, np.asarray(sums / rows))
                for layout, sums, rows in (mine[index] for index in sorted(mine))
            ]
            array = np.stack(each).reshape(*lead, *each[0].shape)
            if not np.isfinite(array).all():
                raise QuantError(
                    f"The inputs of the product with {path} hold NaN or infinities for some batch of the stream. "
                    "Correct the model or the data."
                )
            mean_squares[path] = array
        return MeasuredImportance(mean_squares, left)


def _in_axes(layout: Layout, inputs: np.ndarray) -> np.ndarray:
    """Returns inputs[batch, d_in] in the axes of a slice, with one entry along the axes of outputs."""

    def restored(rows: np.ndarray) -> np.ndarray:
        return np.asarray(layout.restored(jnp.broadcast_to(rows[:, :, None], layout.matrices)))

    numbers = restored(np.arange(inputs.size, dtype=np.int32).reshape(inputs.shape))
    # Along the axes of outputs, the number of an input does not change.
    kept = [slice(1) if (numbers == numbers.take([0], axis)).all() else slice(None) for axis in range(numbers.ndim)]
    return restored(inputs)[tuple(kept)]
