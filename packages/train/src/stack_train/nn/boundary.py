"""Messages between pipeline stages.

`scan_layers` finds the boundary of the current call, so layers need no argument for pipeline stages.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from stack_core.abi.errors import TrainingError
from stack_core.programs.flops import inner_jaxprs
from stack_core.programs.jaxprs import equations_of, inner

__all__ = ["Boundary", "Received", "as_auxiliary", "auxiliary_name", "boundary", "check_independent", "in_stage"]

Tree = Any

_current: ContextVar["Boundary | None"] = ContextVar("boundary", default=None)


@partial(jax.tree_util.register_dataclass, data_fields=["activations", "outputs", "piece"], meta_fields=["pieces"])
@dataclass(frozen=True)
class Received:
    """The message from the previous piece of the layers to the next one.

    Attributes:
      activations: input of the piece's layers by name of the model, as `auxiliary_name`; None keeps the models' own
        inputs.
      outputs: other outputs of all layers by name of the model, [pieces, layers of a piece, ...]; entries of later
        pieces are zeros or outdated. None stands for zeros.
      piece: index of the receiving piece.
      pieces: number of pieces.
    """

    activations: Tree
    outputs: Tree
    piece: Any
    pieces: int


class Boundary:
    """The inputs and outputs of the layers of each model in one call of a function inside `run_stages`.

    Attributes:
      received: message from the previous piece.
      sent: activations and outputs of the layers by name of the model, the message to the next piece.
    """

    def __init__(self, received: Received) -> None:
        self.received = received
        self.sent: tuple[dict[str, Tree], dict[str, Tree]] = ({}, {})
        self._entered = set[str]()

    def enter(self, model: str, carry: Tree, inputs: Tree) -> Tree:
        """Returns the input of the layers.

        Args:
          model: name of the model, as `auxiliary_name`.
          carry: the model's own input of the layers.
          inputs: further inputs, which each piece computes.

        Raises:
          TrainingError: the model runs more than one loop over layers that stages divide.
        """
        if model in self._entered:
            raise TrainingError(
                "mesh.stage splits one loop over layers, and this step runs several: its model has a tower or another "
                "group of layers, or its objective calls a model twice. Set mesh.stage=1."
            )
        self._entered.add(model)
        received = self.received
        if received.activations is None:
            _marked(inputs, _ENTERED, model)
            return _marked(carry, _ENTERED, model)
        arrived = _constant(received.activations[model], model)
        # All stages run one program: the first stage takes its own embedding, later stages the received activations.
        return jax.tree.map(lambda x, y: jnp.where(received.piece == 0, x, y), carry, arrived)

    def leave(self, model: str, carry: Tree, outputs: Tree) -> tuple[Tree, Tree]:
        """Adds the outputs of this piece's layers, [layers of a piece, ...], to the outputs of earlier pieces.

        Returns:
          The activations, and the outputs of all layers, [layers, ...]. They are complete on the last piece.
        """
        pieces, piece = self.received.pieces, jnp.maximum(self.received.piece, 0)
        if self.received.outputs is None:
            earlier = jax.tree.map(lambda x: jnp.zeros((pieces, *x.shape), x.dtype), outputs)
        else:
            earlier = _constant(self.received.outputs[model], model)
        together = jax.tree.map(lambda x, new: x.at[piece].set(new), earlier, outputs)
        for part, value in zip(self.sent, (carry, together), strict=True):
            part[model] = value
        found = carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), together)
        return found if self.received.activations is not None else _marked(found, _LEFT, model)


def _constant(tree: Tree, model: str) -> Tree:
    """Removes the gradients of a message to an auxiliary model, which is frozen: its layers need no backward pass."""
    return lax.stop_gradient(tree) if model else tree


_ENTERED, _LEFT = "stack_layers_entered/", "stack_layers_left/"


def _marked(tree: Tree, event: str, model: str) -> Any:
    return jax.tree.map(lambda x: checkpoint_name(x, event + model), tree)


def check_independent(jaxpr: Any, before: Sequence[frozenset[str]] | None = None) -> list[frozenset[str]]:
    """Checks that the layers of no model read results of the layers of another one.

    All pieces of the models' layers run in the same tick, when the results of later pieces do not exist yet.

    Args:
      jaxpr: trace of a call in a stage without received activations.
      before: names of the models on whose layers each input depends; None for inputs of the call.

    Returns:
      The names of the models on whose layers each result depends.

    Raises:
      TrainingError: layers depend on the layers of another model.
    """
    body = equations_of(jaxpr)
    known = dict.fromkeys((*body.constvars, *body.invars), frozenset[str]())
    known |= dict(zip(body.invars, before or [frozenset()] * len(body.invars), strict=True))
    read = lambda atoms: [known.get(atom, frozenset()) if not hasattr(atom, "val") else frozenset() for atom in atoms]
    for equation in body.eqns:
        inputs = read(equation.invars)
        found = frozenset[str]().union(*inputs)
        outputs = [found] * len(equation.outvars)
        if equation.primitive.name == "name":
            event, _, model = equation.params["name"].rpartition("/")
            if f"{event}/" == _ENTERED and found - {model}:
                raise TrainingError(
                    "mesh.stage runs the layers of all models of an objective at the same time, but the layers of "
                    f"{_titled(model)} read results of {' and '.join(map(_titled, sorted(found - {model})))}. Set "
                    "mesh.stage=1."
                )
            outputs = [found | {model} if f"{event}/" == _LEFT else found]
        elif (called := inner(equation)) is not None:
            outputs = check_independent(called, inputs)
        else:
            for each in inner_jaxprs(equation.params.values()):
                results = check_independent(each, [found] * len(equations_of(each).invars))
                outputs = [old.union(*results) for old in outputs]
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return read(body.outvars)


def _titled(model: str) -> str:
    return f"the objective's model {model!r}" if model else "the trained model"


_AUXILIARY = "auxiliary_model"


def as_auxiliary(model: nnx.Module, name: str) -> nnx.Module:
    """Marks the variables of an auxiliary model in place. Its layers then have their own part of messages."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            node.set_metadata(_AUXILIARY, name)
    return model


def auxiliary_name(layer: nnx.Module) -> str:
    """Returns the name of the auxiliary model of a layer, or "" for layers of the trained model."""
    variables = jax.tree.leaves(nnx.state(layer), is_leaf=lambda x: isinstance(x, nnx.Variable))
    return str(variables[0].get_metadata().get(_AUXILIARY, ""))


def boundary() -> Boundary | None:
    """Returns the current boundary for `scan_layers`, or None outside of stages."""
    return _current.get()


def in_stage(received: Received, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
    """Calls a function whose layers are the layers of one piece.

    Returns:
      The result, and the activations and outputs of the message to the next piece.

    Raises:
      TrainingError: the function does not run `scan_layers` exactly once for each model whose layers stages divide.
    """
    around = Boundary(received)
    token = _current.set(around)
    try:
        result = function(*args, **kwargs)
    finally:
        _current.reset(token)
    if not around.sent[0]:
        raise TrainingError("mesh.stage splits the loop over layers, and this step runs none. Set mesh.stage=1.")
    return result, around.sent
