"""Every hook and every contract has its section, and no section speaks of what is not there."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import re
import unittest
from pathlib import Path

import jax
import jax.numpy as jnp
import pluggy
import pytest
import yaml

from stack_core.abi import hookspecs
from stack_core.abi.hookspecs import DETAILS, HOOKS
from stack_core.abi.models import Outputs
from stack_core.abi.ops import OpCall
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Registrar
from stack_core.commands.config_keys import config_keys
from stack_core.ops import Head
from stack_core.testing import op_checks
from stack_train.run.config import RunConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# With the files outside of docs/ that are pages of the site.
ALL_PAGES = [
    *PAGES,
    *sorted(DOCS.glob("notebooks/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    *(ROOT / name for name in ("README.md", "GLOSSARY.md", "CONTRIBUTING.md", "examples/plugins/README.md")),
]
GENERATED = ("reference/", "../reference/")  # pages that `nox -s docs` writes
spec = importlib.util.spec_from_file_location("readmes", DOCS / "readmes.py")
assert spec is not None and spec.loader is not None
readmes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readmes)
CONTRACTS = (
    "stack_core.abi.adapters",
    "stack_core.abi.caches",
    "stack_core.abi.chips",
    "stack_core.abi.data",
    "stack_core.abi.engines",
    "stack_core.abi.formats",
    "stack_core.abi.generation",
    "stack_core.abi.launchers",
    "stack_core.abi.models",
    "stack_core.abi.objectives",
    "stack_core.abi.observers",
    "stack_core.abi.ops",
    "stack_core.abi.policy",
    "stack_core.abi.reports",
    "stack_core.abi.transforms",
    "stack_core.abi.tuning",
    "stack_core.ops.sampling.processors",
    "stack_core.text.chat_server",
    "stack_core.text.image_models",
    "stack_core.text.message_parsers",
    "stack_rl.contracts",
)


def sections(page):
    """The text below each heading of the third level, or of the second if it names a hook, by the names in it."""
    parts = re.split(r"^(?=##)", (DOCS / page).read_text(), flags=re.MULTILINE)
    headings = [(re.findall(r"`(\w+)`", part.partition("\n")[0]), part) for part in parts]
    return {name: text for names, text in headings for name in names}


def name_of(page):
    return str(page.relative_to(ROOT))


def source_of(page):
    """The file that `docs/readmes.py` copies to a page, or the page."""
    copied = {DOCS / copy: ROOT / source for source, copy in readmes.PAGES.items() if source != "README.md"}
    return copied.get(page.resolve(), page)


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def code_spans(text):
    """The inline code of a page, without its blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


@functools.cache
def literals():
    """Every string in the packages' source with "…" in place of each value, separated by NUL."""
    found = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return "\0".join(found)


def is_printed(message):
    """Whether a string of the source holds the message, in which "…" stands for any text."""
    return re.search("[^\0]*".join(map(re.escape, message.strip("…").split("…"))), literals()) is not None


def messages():
    lines = re.findall(r"^- (`.*`)\\$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [message for line in lines for message in code_spans(line)]


@functools.cache
def known_keys():
    return {key.name.replace("[]", "") for key in config_keys(RunConfig, "train")}


HOOK_SECTIONS = sections("hooks.md")
CONTRACT_SECTIONS = sections("abi.md")


def test_every_hook_has_a_section_and_every_section_a_hook():
    assert sorted(HOOK_SECTIONS) == sorted(HOOKS)


def test_every_contract_has_a_section_and_every_section_a_contract():
    modules = [importlib.import_module(name) for name in CONTRACTS]
    names = [name for module in modules for name in module.__all__]
    assert sorted(CONTRACT_SECTIONS) == sorted(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_are_python(page):
    for block in blocks(page.read_text()):
        ast.parse(block)


@pytest.mark.parametrize("contract", [name for name, text in CONTRACT_SECTIONS.items() if blocks(text)])
def test_a_contracts_example_runs(contract):
    for block in blocks(CONTRACT_SECTIONS[contract]):
        exec(block, {"__name__": "an_example"})


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith(GENERATED):
            continue
        target = source_of(page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], link


def test_links_of_a_copied_file_lead_to_pages():
    text = "[a](../../docs/abi.md#ops) [b](../serve) [c](src/stack_train) [d](https://example.com) f[0](x)"
    assert readmes.linked(text, ROOT / "packages/train/README.md", DOCS / "readmes/train.md") == (
        "[a](../abi.md#ops) [b](serve.md) c (`packages/train/src/stack_train`) [d](https://example.com) f[0](x)"
    )


def test_the_ratios_of_the_front_page_are_measured():
    front, measured = (ROOT / "README.md").read_text(), (DOCS / "benchmarks.md").read_text()
    ratios = re.findall(r"([\d.]+) \u00d7 ([\w.]*\w)", front)
    assert len(ratios) >= 8
    for ratio, peer in ratios:
        row = rf"^\|.* over (.* )?{re.escape(peer)}\b.*\| {re.escape(ratio)} \("
        assert re.search(row, measured, re.MULTILINE), (
            f"docs/benchmarks.md has no ratio {ratio} to {peer}: update README.md"
        )
    for command in re.findall(r"\u00d7.*\| `([^`]+)` \|$", front, re.MULTILINE):
        assert f"`nox -s bench -- {command}`" in measured


@pytest.mark.parametrize("message", messages())
def test_the_message_of_a_remedy_is_still_printed(message):
    assert is_printed(message), f"no string of packages/*/src holds {message!r}; quote the message as it is now"


def test_a_message_that_is_not_in_one_string_of_the_source_is_noticed():
    assert len(messages()) > 50
    assert not is_printed("Unknown key … holds another run")


def is_a_key(name):
    """Whether a name is a key, a section of keys, or an entry of a key that is a mapping, such as mesh.rules."""
    return any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for key in known_keys())


def keys_of(text):
    """The config keys in the inline code of a page."""
    sections_ = {name.partition(".")[0] for name in known_keys()}
    found = {re.split(r"[:=]", span)[0] for span in code_spans(text)}
    dotted = re.compile(r"\w+(\.\w+)+(?<!\.py)(?<!\.yaml)")
    return [name for name in found if name.partition(".")[0] in sections_ and dotted.fullmatch(name)]


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_config_keys_of_a_page_exist(page):
    assert not [name for name in keys_of(page.read_text()) if not is_a_key(name)]


def configs_of(text):
    """The YAML of a page: fenced blocks, and indented lines with the keys of one section in braces."""
    fenced = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    sections_ = {name.partition(".")[0] for name in known_keys()}
    lines = re.findall(r"^ {4}(\w+: \{.*\})(?: +#.*)?$", text, re.MULTILINE)
    lines = [line for line in lines if line.partition(":")[0] in sections_]
    return [yaml.safe_load(each) for each in [*fenced, *lines]]


def flat(mapping, prefix=""):
    for key, value in mapping.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_keys_of_the_yaml_of_a_page_exist(page):
    for config in configs_of(page.read_text()):
        whole = {"data": config} if "environment" in config else config
        assert not [key for key in flat(whole) if not is_a_key(key)], config


def code_of(text):
    return [*code_spans(text), *re.findall(r"^ *stack .+$", text, re.MULTILINE)]


def commands_of(text):
    words = [line.split() for line in code_of(text)]
    return [each[1] for each in words if each[:1] == ["stack"] and re.fullmatch("[a-z]+", " ".join(each[1:2]))]


def public_names_of(text):
    packages = r"\b(stack_(?:core|kernels|quant|train|rl|serve|profile))\.(\w+)"
    return re.findall(packages, " ".join(code_of(text)))


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_commands_and_public_names_of_a_page_exist(page):
    text = page.read_text()
    commands = {name.split()[0] for name in registries.commands}
    assert not set(commands_of(text)) - commands - {"losses", "greet"}  # commands of examples
    for package, name in public_names_of(text):
        exists = hasattr(importlib.import_module(package), name) or importlib.util.find_spec(f"{package}.{name}")
        assert exists, f"{package}.{name}"


def test_the_pages_have_configs_keys_commands_and_names_to_check():
    texts = [page.read_text() for page in ALL_PAGES]
    for find, least in ((configs_of, 20), (keys_of, 150), (commands_of, 400), (public_names_of, 80)):
        assert sum(len(find(text)) for text in texts) >= least, find.__name__


def namespace_of(block):
    namespace = {"__name__": "an_example"}
    exec(block, namespace)
    return namespace


def plugin_of(block):
    """A plugin manager that knows the hooks which a block of Python implements."""
    namespace = namespace_of(block)
    manager = pluggy.PluginManager("stack")
    manager.add_hookspecs(hookspecs)
    manager.register(type("Plugin", (), {name: staticmethod(namespace[name]) for name in namespace if name in HOOKS}))
    manager.check_pending()
    return manager.hook


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.startswith("stack_register_")])
def test_a_hooks_example_registers_something(hook):
    (block,) = blocks(HOOK_SECTIONS[hook])
    kind = hook.removeprefix("stack_register_")
    registrar = Registrar(kind, "example", DETAILS.get(kind, {}))
    getattr(plugin_of(block), hook)(registry=registrar)
    assert registrar.close()


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.startswith("stack_register_")])
def test_a_hooks_section_says_what_the_target_is_and_names_its_details(hook):
    text = HOOK_SECTIONS[hook]
    details = DETAILS.get(hook.removeprefix("stack_register_"), {})
    (line,) = re.findall(r"^- Details: (.*(?:\n  .*)*)$", text, re.MULTILINE)
    assert re.findall(r"(?:^|; )`(\w+)`", line) == list(details) if details else line == "none."
    assert re.search(r"^- Target: ", text, re.MULTILINE)
    assert re.search(r"^- Read ", text, re.MULTILINE)


def test_the_selecting_hooks_example_selects():
    (block,) = blocks(HOOK_SECTIONS["stack_select_op"])
    select = plugin_of(block).stack_select_op
    call = OpCall("norm", {}, {}, "forward")
    assert select(call=call, chip=None, candidates=("reference", "acme_forward")) == "acme_forward"
    assert select(call=call, chip=None, candidates=("reference", "other")) is None


def test_the_ops_example_keeps_its_contract():
    implementation = namespace_of(*blocks(HOOK_SECTIONS["stack_register_ops"]))["PLAIN"]
    ran = 0
    for check in op_checks("gated_linear_unit"):
        if check.aspect == "float32":
            with contextlib.suppress(unittest.SkipTest):
                check(implementation)
                ran += 1
    assert ran


def test_the_objectives_example_gives_a_loss():
    config = namespace_of(*blocks(HOOK_SECTIONS["stack_register_objectives"]))["FocalConfig"]
    focal = config(gamma=0.0).build()
    tokens = jnp.arange(4)[None] % 3
    batch = dict.fromkeys(focal.inputs, tokens)
    loss, metrics = focal(OneHot(), batch, key=None)
    assert metrics["loss"].value == loss
    assert jnp.allclose(loss, jnp.log(jnp.e + 2) - 1)


class OneHot:
    """A model whose most likely token is the one that it is given."""

    def __call__(self, tokens, positions, segment_ids=None, cache=None):
        return Outputs(hidden=jax.nn.one_hot(tokens, 3))

    def head(self):
        return Head(jnp.eye(3))
