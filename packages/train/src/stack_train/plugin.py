"""What stack-train registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_models(registry: Registrar) -> None:
    registry.add("llama", "stack_train.models.llama:FAMILY")


@hookimpl
def stack_register_data_sources(registry: Registrar) -> None:
    registry.add("stdlib", "stack_train.data.stdlib:StdlibSource")
    registry.add("text", "stack_train.data.text:TextSource")
    registry.add("jsonl", "stack_train.data.jsonl:JsonlSource")


@hookimpl
def stack_register_objectives(registry: Registrar) -> None:
    registry.add("causal_lm", "stack_train.objectives:CausalLMConfig")


@hookimpl
def stack_register_optimizers(registry: Registrar) -> None:
    registry.add("adamw", "stack_train.optim:AdamWConfig")


@hookimpl
def stack_register_trainers(registry: Registrar) -> None:
    registry.add("language_model", "stack_train.step:LanguageModelTrainer")


@hookimpl
def stack_register_checkpoint_formats(registry: Registrar) -> None:
    registry.add("hf", "stack_train.huggingface:FORMAT")
    registry.add("run", "stack_train.trained_model:RUN_FORMAT")


@hookimpl
def stack_register_observers(registry: Registrar) -> None:
    registry.add("terminal", "stack_train.observers.terminal:terminal_observer")
    registry.add("jsonl", "stack_train.observers.jsonl:jsonl_observer")
    registry.add("tensorboard", "stack_train.observers.tensorboard:tensorboard_observer")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add("train", "stack_train.commands.train:train", help="Train a model from a config file.", huge_pages=True)
    registry.add(
        "compile",
        "stack_train.commands.compile:compile_run",
        help="Compile a train step for hardware that need not be there.",
    )
    registry.add(
        "generate",
        "stack_train.commands.generate:generate",
        help="Generate text with a trained model.",
        huge_pages=True,
    )
    registry.add(
        "convert", "stack_train.commands.convert:convert", help="Convert to and from Hugging Face checkpoints."
    )
