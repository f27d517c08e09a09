"""Pipeline parallelism: devices along the mesh axis "stage" hold different layers and process different microbatches.

All stages run the same program, tick by tick according to the table of a `Schedule`. An idle stage computes anyway and
discards the result, instead of waiting for its neighbours. No device takes a different branch, so layers can use
collectives along other mesh axes as usual. All stages compute the embedding before the layers and the loss after
them, but only the first stage's embedding and the last stage's loss are used.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from stack_core.abi.errors import ShardingError, TrainingError
from stack_train.nn.schedules import COLUMNS, Phase, Schedule
from stack_train.step.precision import add_gradients, zero_sums

__all__ = ["Boundary", "boundary", "run_stages"]

Tree = Any
Function = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]
"""Function (layers of a piece, shared parameters, microbatch) -> (loss, metrics)."""

_current: ContextVar["Boundary | None"] = ContextVar("boundary", default=None)


class Boundary:
    """The input and output of the layers in one call of a model inside `run_stages`.

    Attributes:
      received: input of the layers, from the previous stage; None keeps the model's own input.
      is_first: True for the first piece of the layers, which ignores `received`.
      output: output of the layers.
    """

    def __init__(self, received: Tree = None, is_first: Any = True) -> None:
        self.received, self.is_first, self.output = received, is_first, None
        self._entered = False

    def enter(self, carry: Tree) -> Tree:
        """Returns the input of the layers.

        Raises:
          TrainingError: the model runs more than one loop over layers.
        """
        if self._entered:
            raise TrainingError(
                "mesh.stage splits one loop over layers, and this step runs several: its model has more than one group "
                "of repeating layers, or its objective calls more than one model. Set mesh.stage=1."
            )
        self._entered = True
        if self.received is None:
            return carry
        # All stages run one program: the first stage takes its own embedding, later stages the received activations.
        return jax.tree.map(lambda embedded, x: jnp.where(self.is_first, embedded, x), carry, self.received)

    def leave(self, carry: Tree, outputs: Tree) -> Tree:
        """Records the output of the layers.

        Raises:
          TrainingError: the layers have outputs besides the carry.
        """
        if jax.tree.leaves(outputs):
            raise TrainingError(
                "The layers report facts, as experts and trained indexers do, and the objective gets none from stages. "
                "Set mesh.stage=1, and split experts over mesh.expert."
            )
        self.output = carry
        return carry


def boundary() -> Boundary | None:
    """Returns the current boundary for `scan_layers`, or None outside of stages."""
    return _current.get()


@contextlib.contextmanager
def _around(found: Boundary) -> Iterator[None]:
    token = _current.set(found)
    try:
        yield
    finally:
        _current.reset(token)


def run_stages(
    function: Function,
    layers: Mapping[str, jax.Array],
    shared: Mapping[str, jax.Array],
    microbatches: Tree,
    schedule: Schedule,
    *,
    gradients: bool,
    specs: tuple[Mapping[str, PartitionSpec], Mapping[str, PartitionSpec]],
) -> tuple[Tree, tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]] | None]:
    """Calls a function for each microbatch, and optionally sums the gradients of its losses.

    Args:
      function: loss function, which must run `scan_layers` exactly once over its layers.
      layers: arrays [layers, ...], split over "stage".
      shared: the remaining parameters, replicated over "stage".
      microbatches: arrays [microbatches, ...], replicated over "stage".
      schedule: schedule of the stages.
      gradients: computes gradients; otherwise only the forward half of the table runs.
      specs: partition specs of the gradients of `layers` and `shared`.

    Returns:
      The metrics, stacked [microbatches, ...], and the gradients of the sum of all losses with respect to `layers` and
      `shared`, or None.

    Raises:
      ShardingError: the layers do not divide into the pieces of the schedule.
      TrainingError: the function does not run `scan_layers` exactly once, or layers report facts.
    """
    stages, chunks = schedule.stages, schedule.chunks
    for name, leaf in layers.items():
        if leaf.shape[0] % (stages * chunks):
            raise ShardingError(
                f"{name} has {leaf.shape[0]} layers, which is no multiple of {stages * chunks}: mesh.stage={stages} x "
                f"run.pipeline.chunks={chunks} pieces. Change model.layers, mesh.stage or run.pipeline.chunks.",
                logical_axes=["layers"],
            )
    # [layers, ...] -> [chunks, stages, layers of a piece, ...]: piece g is chunk g // stages of stage g % stages.
    # Interleaved chunks: neighbouring pieces lie on neighbouring stages, so results always move one stage on.
    pieces = {name: x.reshape(chunks, stages, -1, *x.shape[1:]) for name, x in layers.items()}
    by_stage = PartitionSpec(None, "stage")
    outs: Any = (PartitionSpec(), (by_stage, PartitionSpec()) if gradients else None)
    run = partial(_Stage.run, function, schedule, gradients, specs)
    mapped = jax.shard_map(
        run, axis_names={"stage"}, in_specs=(by_stage, PartitionSpec(), PartitionSpec()), out_specs=outs
    )
    metrics, found = mapped(pieces, dict(shared), microbatches)
    if found is None:
        return metrics, None
    # [chunks, stages, layers of a piece, ...] -> [layers, ...], the inverse of `pieces`.
    of_layers = {name: found[0][name].reshape(x.shape) for name, x in layers.items()}
    return metrics, (of_layers, found[1])


@dataclass(frozen=True, eq=False)
class _Carry:
    """State that a stage carries between ticks."""

    inputs: Tree  # [slots, ...], activations received from the previous stage
    gradients: Tree  # [gradient_slots, ...], cotangents of this stage's outputs, from the next stage
    metrics: Tree  # [microbatches, ...]
    of_layers: Tree  # gradient sums of this stage's layers, in a wide dtype
    of_shared: Tree  # gradient sums of the shared parameters


jax.tree_util.register_dataclass(_Carry, list(_Carry.__dataclass_fields__), [])


@dataclass(frozen=True, eq=False)
class _Stage:
    """One stage inside `jax.shard_map`; its layers are arrays [chunks, layers of a piece, ...]."""

    function: Function
    schedule: Schedule
    with_gradients: bool
    specs: tuple[Mapping[str, PartitionSpec], Mapping[str, PartitionSpec]]
    layers: Mapping[str, jax.Array]
    shared: Mapping[str, jax.Array]
    microbatches: Tree
    index: Any

    @classmethod
    def run(
        cls,
        function: Function,
        schedule: Schedule,
        with_gradients: bool,
        specs: Any,
        layers: Any,
        shared: Any,
        rows: Any,
    ) -> Any:
        """Runs all ticks; returns the results of `run_stages` by stage."""
        # shard_map leaves an axis of size 1 for "stage".
        layers = {name: x[:, 0] for name, x in layers.items()}
        # Arrays that do not vary over stages would have their gradients summed over the stages in every tick.
        shared, rows = _varying((shared, rows))
        stage = cls(function, schedule, with_gradients, specs, layers, shared, rows, lax.axis_index("stage"))
        # The carry of the scans. One loop per phase: warm-up omits the backward half, and drain the forward half.
        carried = stage.start()
        for phase in schedule.phases:
            if phase.forward or with_gradients:
                ticks = {name: schedule.table[name][phase.start : phase.end] for name in COLUMNS}
                carried, _ = lax.scan(partial(stage.tick, phase), carried, ticks)
        # Replicates the results; with the axis of "stage" restored, shard_map concatenates the layers of all stages.
        metrics = lax.psum(carried.metrics, "stage")  # zero on all stages except the last
        if not with_gradients:
            return metrics, None
        return metrics, (
            {name: x[:, None] for name, x in carried.of_layers.items()},
            lax.psum(carried.of_shared, "stage"),
        )

    def start(self) -> _Carry:
        """Returns the initial state, filled with zeros."""
        row = jax.tree.map(lambda x: x[0], self.microbatches)
        piece = {name: x[0] for name, x in self.layers.items()}
        # Shapes of what crosses a stage boundary; nothing is computed.
        output, _, metrics = jax.eval_shape(partial(self.call, None, True), piece, self.shared, row)
        zeros = lambda tree, *lead: jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)
        wanted = self.with_gradients
        schedule = self.schedule
        carried = _Carry(
            inputs=zeros(output, schedule.slots),
            gradients=zeros(output, schedule.gradient_slots) if wanted else (),
            metrics=zeros(metrics, schedule.microbatches),
            of_layers=zero_sums(self.layers) if wanted else {},
            of_shared=zero_sums(self.shared) if wanted else {},
        )
        return self.sharded(_varying(carried))

    def call(self, received: Tree, is_first: Any, piece: Tree, shared: Tree, row: Tree) -> tuple[Tree, Any, Tree]:
        """Runs the function on a piece; returns the output of the layers, the loss and the metrics."""
        around = Boundary(received, is_first)
        with _around(around):
            loss, metrics = self.function(piece, shared, row)
        if around.output is None:
            raise TrainingError("mesh.stage splits the loop over layers, and this step runs none. Set mesh.stage=1.")
        return _varying((around.output, loss, metrics))

    def tick(self, phase: Phase, carried: _Carry, columns: Mapping[str, Any]) -> tuple[_Carry, None]:
        """Runs one tick: at most one forward and one backward step, and the exchange with both neighbours."""
        now = {name: column[self.index] for name, column in columns.items()}
        inputs, gradients = carried.inputs, carried.gradients
        fields: dict[str, Any] = {name: getattr(carried, name) for name in ("metrics", "of_layers", "of_shared")}
        if phase.forward:
            output, metrics = self.forward(carried, now)
            # ppermute runs on all stages in every tick. A stage without a new input has slot -1 and keeps its buffers.
            inputs = _written(inputs, now["arriving_slot"], self.passed(output, 1))
            if not self.with_gradients:
                # The loss is valid only on the last piece; -1 leaves the metrics of other stages unchanged.
                is_last = self.is_last(now["forward_chunk"])
                fields["metrics"] = _written(carried.metrics, jnp.where(is_last, now["forward"], -1), metrics)
        if phase.backward and self.with_gradients:
            changed, of_input = self.backward(carried, now)
            fields |= changed
            # Cotangents travel in the opposite direction.
            gradients = _written(gradients, now["arriving_gradient_slot"], self.passed(of_input, -1))
        return self.sharded(_Carry(inputs=inputs, gradients=gradients, **fields)), None

    def forward(self, carried: _Carry, now: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Runs a piece forward; returns its output and the metrics, which are valid only for the last piece."""
        chunk, row = now["forward_chunk"], _read(self.microbatches, now["forward"])
        received = _read(carried.inputs, now["forward_slot"])
        output, _, metrics = self.call(received, self.is_first(chunk), self.piece(chunk), self.shared, row)
        return output, metrics

    def backward(self, carried: _Carry, now: Mapping[str, Any]) -> tuple[dict[str, Tree], Tree]:
        """Recomputes a piece from its saved input and runs it backward.

        Returns:
          The changed fields of the state, and the cotangent of the piece's input.
        """
        chunk, row = now["backward_chunk"], _read(self.microbatches, now["backward"])
        is_first, is_last, does = self.is_first(chunk), self.is_last(chunk), now["backward"] >= 0

        def run(piece: Tree, shared: Tree, received: Tree) -> tuple[tuple[Tree, Any], Tree]:
            output, loss, metrics = self.call(received, is_first, piece, shared, row)
            return (output, loss), metrics

        received = _read(carried.inputs, now["backward_slot"])
        # Recomputes the piece: only its input is stored between the two passes.
        (output, loss), vjp, metrics = jax.vjp(run, self.piece(chunk), self.shared, received, has_aux=True)
        arrived = _read(carried.gradients, now["gradient_slot"])
        # The last piece computes the loss, whose cotangent is 1; its output goes nowhere, so its cotangent is 0.
        of_output = jax.tree.map(lambda x, g: jnp.where(is_last, 0, g).astype(x.dtype), output, arrived)
        of_piece, of_shared, of_input = vjp((of_output, jnp.where(is_last, 1, 0).astype(loss.dtype)))
        # Idle ticks compute a backward pass of arbitrary entries, whose gradients must not be added.
        counted = lambda x: jnp.where(does, x, 0)
        at = jnp.maximum(chunk, 0)
        return {
            "metrics": _written(carried.metrics, jnp.where(is_last, now["backward"], -1), metrics),
            "of_layers": jax.tree.map(
                lambda sums, x: sums.at[at].add(counted(x).astype(sums.dtype)), carried.of_layers, of_piece
            ),
            "of_shared": add_gradients(carried.of_shared, jax.tree.map(counted, of_shared)),
        }, of_input

    def piece(self, chunk: Any) -> dict[str, jax.Array]:
        return dict(_read(self.layers, chunk))

    def is_first(self, chunk: Any) -> Any:
        # -1 is the chunk of an idle tick, whose results are discarded.
        return (self.index == 0) & (chunk <= 0)

    def is_last(self, chunk: Any) -> Any:
        return (self.index == self.schedule.stages - 1) & (chunk == self.schedule.chunks - 1)

    def passed(self, tree: Tree, by: int) -> Tree:
        """Shifts arrays by `by` stages along the pipeline, cyclically."""
        stages = self.schedule.stages
        # A cycle: with several chunks the last stage sends to the first stage, which holds the next chunk.
        pairs = [(stage, (stage + by) % stages) for stage in range(stages)]
        return jax.tree.map(lambda x: lax.ppermute(x, "stage", pairs), tree)

    def sharded(self, carried: _Carry) -> _Carry:
        """Shards gradients like their parameters along mesh axes other than "stage"."""
        if not self.with_gradients:
            return carried
        of_layers, of_shared = (
            {name: lax.with_sharding_constraint(x, specs[name]) for name, x in sums.items()}
            for sums, specs in zip((carried.of_layers, carried.of_shared), self.specs, strict=True)
        )
        return _Carry(carried.inputs, carried.gradients, carried.metrics, of_layers, of_shared)


def _varying(tree: Tree) -> Tree:
    """Casts arrays to the type of arrays that vary over stages."""

    def cast(x: Any) -> Any:
        return x if "stage" in jax.typeof(x).mat.varying else lax.pcast(x, ("stage",), to="varying")

    return jax.tree.map(cast, tree)


def _read(tree: Tree, place: Any) -> Tree:
    """Returns entry `place` of arrays; for -1, an arbitrary entry."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.maximum(place, 0), keepdims=False), tree)


def _written(tree: Tree, place: Any, value: Tree) -> Tree:
    """Returns arrays with entry `place` replaced; unchanged if `place` is -1."""
    at = jnp.maximum(place, 0)

    def write(x: Any, new: Any) -> Any:
        # Selects between two entries, not between two buffers.
        old = lax.dynamic_index_in_dim(x, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(x, jnp.where(place >= 0, new, old).astype(x.dtype), at, 0)

    return jax.tree.map(write, tree, value)
