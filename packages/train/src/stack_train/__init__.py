"""Trains models: models, data, optimizers, objectives, checkpoints.

Train from a config file or a dict, then generate text and export::

    import stack_train

    model = {"name": "llama", "vocab_size": 300, "layers": 1, "embed": 32, "heads": 2, "mlp": 64}
    config = {"output": "runs/small", "model": model, "data": {"source": "text:*.txt", "seq_tokens": 16}}
    print(stack_train.train(config, run={"steps": 2}))  # or train("run.yaml", resume=True)
    small = stack_train.load("runs/small")  # or "hf:DIR", "gguf:FILE"
    print(small.generate("one two", max_tokens=4))
    small.save_pretrained("exported")
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_train.checkpoint import CheckpointStore as CheckpointStore
    from stack_train.contrastive.loading import ImageTextModel as ImageTextModel
    from stack_train.contrastive.loading import load_image_text as load_image_text
    from stack_train.conversion import convert as convert
    from stack_train.generation.generate import TextGenerator as TextGenerator
    from stack_train.generation.sampling import SamplingConfig as SamplingConfig
    from stack_train.loading import LoadedModel as LoadedModel
    from stack_train.loading import load as load
    from stack_train.objectives import CausalLMConfig as CausalLMConfig
    from stack_train.run.config import RunConfig as RunConfig
    from stack_train.run.config import RunSettings as RunSettings
    from stack_train.run.loop import RunSummary as RunSummary
    from stack_train.run.run import Run as Run
    from stack_train.run.run import build as build
    from stack_train.run.session import train as train
    from stack_train.run.train import start as start
    from stack_train.step.program import Program as Program
    from stack_train.step.step import Step as Step
    from stack_train.step.step import make_step as make_step
    from stack_train.trainer import Trainer as Trainer

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_train.checkpoint": ["CheckpointStore"],
            "stack_train.contrastive.loading": ["ImageTextModel", "load_image_text"],
            "stack_train.conversion": ["convert"],
            "stack_train.generation.generate": ["TextGenerator"],
            "stack_train.generation.sampling": ["SamplingConfig"],
            "stack_train.loading": ["LoadedModel", "load"],
            "stack_train.objectives": ["CausalLMConfig"],
            "stack_train.run.config": ["RunConfig", "RunSettings"],
            "stack_train.run.loop": ["RunSummary"],
            "stack_train.run.run": ["Run", "build"],
            "stack_train.run.session": ["train"],
            "stack_train.run.train": ["start"],
            "stack_train.step.program": ["Program"],
            "stack_train.step.step": ["Step", "make_step"],
            "stack_train.trainer": ["Trainer"],
        },
    )
