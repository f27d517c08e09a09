"""What stack-serve registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_engines(registry: Registrar) -> None:
    registry.add("llm", "stack_serve.llm.engine:LLMEngine")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add("serve", "stack_serve.commands.serve:serve", help="Serve a model over HTTP, as OpenAI and vLLM do.")
