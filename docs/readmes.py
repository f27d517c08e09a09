"""Copies the READMEs outside of docs/ to pages of the site, and turns links to them into links between pages."""

import os
import re
from pathlib import Path

__all__ = ["linked", "write_readmes"]

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGES = ("core", "kernels", "quant", "train", "rl", "serve", "profile")
# Sources and their pages below docs/.
PAGES = {
    **{f"packages/{name}/README.md": f"readmes/{name}.md" for name in PACKAGES},
    "examples/plugins/README.md": "readmes/plugins.md",
    "GLOSSARY.md": "readmes/glossary.md",
    "CONTRIBUTING.md": "readmes/contributing.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def write_readmes(folder: Path) -> None:
    """Writes each source as a page of the folder, except the main README, whose page is index.md."""
    folder.mkdir(exist_ok=True)
    for source, page in PAGES.items():
        path = DOCS / page
        if path.parent == folder:
            text = linked((ROOT / source).read_text(encoding="utf-8"), ROOT / source, path)
            # Sphinx builds changed pages again.
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def linked(text: str, source: Path, page: Path) -> str:
    """Replaces the links of a text by links from its page. A file without a page becomes its path.

    Args:
      text: Markdown.
      source: file that the links are relative to.
      page: file of the page that shows the text.
    """

    def replaced(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if not target.exists() or ROOT not in target.parents:
            return link[0]
        path = str(target.relative_to(ROOT))
        name = PAGES.get(path) or PAGES.get(f"{path}/README.md")
        if name is None and DOCS not in target.parents:
            return link[1] if link[1].strip("`") == path else f"{link[1]} (`{path}`)"
        destination = os.path.relpath(DOCS / name if name else target, page.parent)
        return f"[{link[1]}]({destination}{link[3] or ''})"

    return _LINK.sub(replaced, text)
