"""The built site in Chromium: contrast, headings, names, keyboard, search, on a wide light and a narrow dark page.

`nox -s docs` builds the site and installs axe-core (https://github.com/dequelabs/axe-core) before it runs these tests.
"""

import json
import os
from pathlib import Path

import pytest

SITE = Path(__file__).with_name("_build") / "html"
PAGES = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html"))
# WCAG 2 A and AA, and what Lighthouse checks of headings. The theme's page for searches has no heading.
RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa"]}
HEADINGS = {"heading-order": {"enabled": True}, "page-has-heading-one": {"enabled": True}}


@pytest.fixture(scope="module")
def axe():
    return Path(os.environ["AXE"]).read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_readable_by_all(browser, axe, page, width, scheme):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=(SITE / page).as_uri())
    browser.wait_for("document.readyState === 'complete'")
    browser.evaluate(f"{axe}; 0")
    options = json.dumps({"runOnly": RULES, "rules": HEADINGS if page.name != "search.html" else {}})
    found = "found.violations.map(each => [each.id, each.help, each.nodes.map(node => node.html)])"
    expression = f"axe.run(document, {options}).then(found => JSON.stringify({found}))"
    result = browser.call("Runtime.evaluate", expression=expression, awaitPromise=True)["result"]
    assert json.loads(result["value"]) == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), (
        "the page is wider than the window"
    )


def test_search_works_without_a_server(browser):
    browser.requested.clear()
    browser.call("Page.navigate", url=f"{(SITE / 'search.html').as_uri()}?q=quantize")
    browser.wait_for("document.querySelectorAll('#search-results li a').length > 5")
    assert all(each.startswith(SITE.as_uri()) for each in browser.values("#search-results li a", "each.href"))
    assert all(address.startswith(("file:", "about:", "data:")) for address in browser.requested)


def test_every_page_is_in_the_index_of_the_search():
    index = (SITE / "searchindex.js").read_text(encoding="utf-8")
    pages = [page.with_suffix("") for page in PAGES if page.name not in ("search.html", "genindex.html", "index.html")]
    assert len(pages) > 40
    assert [str(page) for page in pages if f'"{page}"' not in index] == []
