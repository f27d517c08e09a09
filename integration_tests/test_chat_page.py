"""The chat page of `stack serve` in a real browser, against a tiny Llama whose weights force its answers."""

import json

import httpx2
import pytest
from browser import Browser

from .forced import ANSWER, TOOLS
from .served import KEY, Served

QUESTION = "17 + 25?"


@pytest.fixture(scope="module")
def served(forced_server: Served) -> Served:
    return forced_server


def opened(browser: Browser, served: Served, key: str) -> str:
    """Opens the page in a tab whose user has entered an API key before; returns its address."""
    address = f"{served.address}/"
    browser.call("Page.navigate", url=address)
    browser.wait_for("document.body?.dataset.ready")
    stored = json.dumps({"settings": {"key": key}})
    browser.evaluate(f"sessionStorage.setItem('stack-chat', {json.dumps(stored)})")
    browser.requested.clear(), browser.complaints.clear()
    browser.call("Page.navigate", url=address)
    browser.wait_for("document.body?.dataset.ready")
    return address


def put(browser: Browser, name: str, value: str) -> None:
    """Enters a value as a person does, with its events."""
    browser.evaluate(
        f"(() => {{ const field = document.getElementById({json.dumps(name)}); field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def say(browser: Browser, text: str) -> None:
    """Types a message and waits until its answer, or an error, is there."""
    browser.evaluate("document.getElementById('question').focus()")
    browser.call("Input.insertText", text=text)
    browser.press("Enter")
    browser.wait_for("document.body.dataset.running === 'false' && !document.getElementById('question').value")
    browser.wait_for("document.querySelector('article:last-child :is(.error, .facts:not(:empty))')")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.values(selector, "each.innerText")


def test_a_conversation_with_tools_in_the_browser(served: Served, browser: Browser) -> None:
    address = opened(browser, served, KEY)
    put(browser, "tools", json.dumps(TOOLS))
    put(browser, "temperature", "0")
    say(browser, QUESTION)
    assert [line.split("\n")[0] for line in texts(browser, "article > b")] == ["You", "Model"]
    assert texts(browser, ".call > b") == ["Calls add", "Calls mul"]
    assert json.loads(texts(browser, ".call pre")[0]) == {"x": 17, "y": 25}
    assert "tokens/s" in texts(browser, "article.assistant .facts")[0]

    browser.evaluate("[...document.querySelectorAll('textarea[data-call]')].forEach(each => each.value = '42')")
    browser.evaluate("document.querySelector('.call button').click()")
    browser.wait_for("document.querySelectorAll('article.assistant').length === 2")
    browser.wait_for("document.body.dataset.running === 'false'")
    assert texts(browser, "article.assistant:last-child .text") == ["".join(ANSWER[4:])]
    assert browser.evaluate("document.querySelector('article:last-child details p').textContent.trim()") == "All done."

    # A reload keeps the conversation; a new chat and "Edit" shorten it.
    browser.call("Page.navigate", url=address)
    browser.wait_for("document.body?.dataset.ready && document.querySelectorAll('article').length === 5")
    browser.evaluate("[...document.querySelectorAll('article.user button')].at(0).click()")
    assert browser.evaluate("document.getElementById('question').value") == QUESTION
    assert not texts(browser, "article")
    assert all(each.startswith((served.address, "data:")) for each in browser.requested), "no other server"
    assert not browser.complaints


def test_probabilities_of_tokens_and_an_answer_that_is_stopped(served: Served, browser: Browser) -> None:
    opened(browser, served, KEY)
    browser.evaluate("document.getElementById('logprobs').checked = true")
    put(browser, "max_completion_tokens", "3")
    say(browser, QUESTION)
    tokens = texts(browser, ".token")
    assert len(tokens) == 3 and "".join(tokens).startswith("Let me see.")
    first = browser.evaluate("document.querySelector('.token').dataset.alternatives").splitlines()
    assert first[0].split(maxsplit=1)[1] == '"Let me"' and len(first) == 5
    assert "cut by the maximum of tokens" in texts(browser, ".facts")[-1]
    browser.evaluate("document.querySelector('.token').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
    assert browser.evaluate("document.getElementById('alternatives').innerText").splitlines() == first
    assert not browser.complaints


def test_a_conversation_goes_on_after_a_call_that_was_cut(served: Served, browser: Browser) -> None:
    opened(browser, served, KEY)
    put(browser, "tools", json.dumps(TOOLS))
    put(browser, "temperature", "0")
    put(browser, "max_completion_tokens", "4")
    say(browser, QUESTION)
    assert texts(browser, ".call > b") == ["Calls add"] and not texts(browser, "textarea[data-call]")
    say(browser, QUESTION)
    assert not texts(browser, ".error") and len(texts(browser, "article.assistant")) == 2
    assert not browser.complaints


def test_a_conversation_too_large_to_be_stored_goes_on(served: Served, browser: Browser) -> None:
    opened(browser, served, KEY)
    browser.evaluate("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }")
    say(browser, QUESTION)
    assert texts(browser, "article.assistant button") == ["Retry"] and not browser.complaints


def test_errors_of_the_server_are_shown_as_text(served: Served, browser: Browser) -> None:
    opened(browser, served, "")
    assert "key" in texts(browser, ".error")[0].lower() and browser.evaluate(
        "!document.getElementById('settings').hidden"
    )
    put(browser, "key", KEY)
    browser.wait_for("document.getElementById('model').value")
    for name, value, told in (
        ("tools", "[{", "The tools are not JSON"),
        ("tools", '[{"type": "function", "function": {"name": "<img src=x onerror=alert(1)>"}}]', "name"),
    ):
        put(browser, name, value)
        say(browser, "<b>bold</b>")
        assert told in texts(browser, ".error")[-1]
    assert texts(browser, "article.user .text")[0] == "<b>bold</b>"
    assert not browser.evaluate("document.querySelectorAll('#log b b, #log img').length")


def test_the_page_is_served_without_a_key_and_with_a_policy(served: Served) -> None:
    answer = httpx2.get(f"{served.address}/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src 'self'" in policy
