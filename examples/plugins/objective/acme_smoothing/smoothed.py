"""`objective: {name: smoothed}`: cross-entropy with label smoothing."""

from typing import ClassVar, Literal

from stack_core.abi.config import config
from stack_core.abi.metrics import Metric
from stack_core.abi.objectives import Objective


@config
class Smoothed(Objective):
    """Cross-entropy with a fraction `smoothing` of each target's probability spread evenly over the vocabulary.

    Source: Szegedy et al., 2015 (arXiv:1512.00567), section 7.
    """

    name: Literal["smoothed"] = "smoothed"
    smoothing: float = 0.1

    inputs: ClassVar = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch seq")

    def __call__(self, model, batch, *, key, **auxiliary):
        outputs = model(batch["tokens"], batch["positions"], batch["segment_ids"])
        loss = model.head().cross_entropy(outputs.hidden, batch["targets"], label_smoothing=self.smoothing)
        return loss, {"loss": Metric.mean(loss, (batch["targets"] >= 0).sum().astype("float32"))}
