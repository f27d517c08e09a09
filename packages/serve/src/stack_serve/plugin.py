"""Registrations of stack-serve."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_engines(registry: Registrar) -> None:
    registry.add("llm", "stack_serve.llm.engine:LLMEngine")


@hookimpl
def stack_register_chat_servers(registry: Registrar) -> None:
    registry.add("openai", "stack_serve.openai.local_server:LocalServer")


@hookimpl
def stack_register_checks(registry: Registrar) -> None:
    registry.add("server", "stack_serve.checks:check_server", variables=("STACK_API_KEY",))


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add("bench serve", "stack_serve.commands.bench_serve:bench_serve", help="Measure a server under load.")
    registry.add("bundle inspect", "stack_serve.commands.bundle:inspect", help="Print the signatures of a bundle.")
    registry.add("bundle ls", "stack_serve.commands.bundle:ls", help="List the bundles in a directory tree.")
    registry.add("bundle verify", "stack_serve.commands.bundle:verify", help="Verify a bundle and replay its examples.")
    registry.add("chat", "stack_serve.commands.chat:chat", help="Chat with a model in the terminal.", huge_pages=True)
    registry.add("evaluate", "stack_serve.commands.evaluate:evaluate", help="Evaluate a language model on benchmarks.")
    registry.add("export", "stack_serve.commands.export:export", help="Export a model as a bundle.")
    registry.add(
        "serve",
        "stack_serve.commands.serve:serve",
        help="Serve a language model with OpenAI's API, or bundles.",
        huge_pages=True,
    )
