"""The playground streams one prompt under two policies; its pages reveal nothing and start nothing for others."""

import json
import re
from urllib.parse import urlencode

import pytest

from retain.server.observers.inspector.routes import STATIC_FOLDER
from tests.server.conftest import API_KEYS, HTTP, run_tiny_server, wait_until

pytestmark = pytest.mark.slow

PAGES = ("/inspect", "/inspect/playground")
REQUEST = {"prompt": "Once upon a time there was a lamp that nobody could put out. " * 3, "max_tokens": 64, "seed": 1}
POLICIES = ("full", "h2o:budget=25%")
IS_DONE = "!document.querySelector('#run').disabled"


@pytest.fixture(scope="module")
def inspected_server():
    with run_tiny_server(enable_inspector=True) as running:
        yield running


def root_of(server):
    return server.url.removesuffix("/v1")


def playground_url(server, run="1", policies=POLICIES, **options):
    fields = {"max-tokens" if name == "max_tokens" else name: value for name, value in (REQUEST | options).items()}
    query = urlencode(fields | {"left": policies[0], "right": policies[1], "run": run})
    return f"{root_of(server)}/inspect/playground?{query}"


def ask(server, policy, is_chat):
    """Return the text and the statistics of the API's answer to the page's request, without a stream."""
    prompt = {"messages": [{"role": "user", "content": REQUEST["prompt"]}]} if is_chat else {}
    fields = {name: value for name, value in REQUEST.items() if not (is_chat and name == "prompt")}
    body = {"model": "smollm2", "temperature": 0, "kv_policy": policy, **fields, **prompt}
    response = HTTP.post(f"{server.url}/{'chat/' if is_chat else ''}completions", json=body)
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    return choice["message"]["content"] if is_chat else choice["text"], response.json()["retain"][0]["kv"]


def read_column(browser, side):
    """Return what a column shows."""
    script = """(() => {
        const find = (name) => document.getElementById(SIDE).querySelector(name);
        const names = ["answer", "same", "rate", "ttft", "kv", "count"], failure = find(".failure");
        const texts = Object.fromEntries(names.map((name) => [name, find(`.${name}`).textContent]));
        const shownFailure = failure.hidden ? null : failure.textContent;
        return { ...texts, bytes: find(".bytes").title, marked: !find("mark").hidden, failure: shownFailure };
    })()"""
    return browser.evaluate(script.replace("SIDE", json.dumps(side)))


# ---- what is served --------------------------------------------------------------------------------------------------


def test_playground_is_off_by_default(tiny_server):
    assert HTTP.get(f"{root_of(tiny_server)}/inspect/playground").status_code == 404


@pytest.mark.parametrize("path", PAGES)
def test_pages_need_no_key_and_load_only_files_that_need_none(secured_server, path):
    root = root_of(secured_server)
    page = HTTP.get(root + path)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", page.text), "the policy refuses inline code"
    for file in re.findall(r'(?:src|href)="([^"]*)"', page.text):
        response = HTTP.get(root + file)
        assert file.startswith("/inspect") and response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'none'; ")
    other = PAGES[1 - PAGES.index(path)]
    assert f'<a href="{other}">' in page.text


def test_playground_page_has_what_its_script_uses():
    scripts = "".join((STATIC_FOLDER / name).read_text() for name in ("common.js", "playground.js"))
    page = (STATIC_FOLDER / "playground.html").read_text()
    assert set(re.findall(r'\$\("([\w-]+)"\)', scripts)) <= set(re.findall(r'id="([\w-]+)"', page))
    classes = set(re.findall(r'(?:find|show)\("\.([\w-]+)"', scripts))
    assert classes and classes <= set(" ".join(re.findall(r'class="([^"]+)"', page)).split())


def test_no_script_writes_html():
    for path in STATIC_FOLDER.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", path.read_text()), path


@pytest.mark.parametrize("site", ["cross-site", "same-site", None])
def test_a_link_of_another_site_starts_no_request(inspected_server, site):
    """It fills in the form, and the user may press Run. An old browser does not say where a link comes from."""
    headers = {"Sec-Fetch-Site": site} if site else {}
    response = HTTP.get(playground_url(inspected_server, prompt="a&run=1"), headers=headers)
    assert response.status_code == 303
    target = response.next_request.url
    assert "run" not in target.params and target.params["prompt"] == "a&run=1" and target.path == "/inspect/playground"
    assert HTTP.get(target, headers=headers).status_code == 200


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_a_typed_address_may_start_a_request(inspected_server, site):
    assert HTTP.get(playground_url(inspected_server), headers={"Sec-Fetch-Site": site}).status_code == 200


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_playground_shows_what_the_api_answers(chromium, inspected_server, is_chat):
    """Both columns have the API's text, its bytes, and times; the difference is marked where it is."""
    expected = [ask(inspected_server, policy, is_chat) for policy in POLICIES]
    chromium.open(playground_url(inspected_server, chat=int(is_chat)))
    chromium.wait_for(IS_DONE)
    columns = [read_column(chromium, side) for side in ("left", "right")]
    for column, (text, kv) in zip(columns, expected, strict=True):
        assert column["answer"] == text and column["failure"] is None
        assert column["count"] == "64" and float(column["rate"]) > 0 and float(column["ttft"].removesuffix(" ms")) > 0
        assert column["bytes"] == f"{kv['bytes_end']} bytes" and column["kv"].startswith(f"{kv['policy']}: ")
        assert column["marked"]
    (left, _), (right, _) = expected
    num_same = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    assert [column["same"] for column in columns] == [left[:num_same]] * 2
    difference = chromium.evaluate("document.querySelector('#difference').textContent")
    assert difference == f"The answers first differ at character {num_same + 1}."
    assert expected[0][1]["bytes_end"] > expected[1][1]["bytes_end"], "so that the columns differ"
    assert not chromium.problems and all(url.startswith(root_of(inspected_server)) for url in chromium.urls)


def test_playground_marks_nothing_in_equal_answers(chromium, inspected_server):
    chromium.open(playground_url(inspected_server, policies=("full", "")))
    chromium.wait_for(IS_DONE)
    columns = [read_column(chromium, side) for side in ("left", "right")]
    assert columns[0]["answer"] == columns[1]["answer"] == ask(inspected_server, "full", False)[0]
    assert not any(column["marked"] for column in columns)
    assert chromium.evaluate("document.querySelector('#difference').textContent") == "The answers are equal."


def test_playground_shows_an_error_in_its_column(chromium, inspected_server):
    body = {"model": "smollm2", "prompt": "x", "kv_policy": "nosuch"}
    error = HTTP.post(f"{inspected_server.url}/completions", json=body).json()["error"]["message"]
    assert "nosuch" in error and "\n" not in error
    chromium.open(playground_url(inspected_server, policies=("nosuch", "full")))
    chromium.wait_for(IS_DONE)
    left, right = (read_column(chromium, side) for side in ("left", "right"))
    assert left["failure"] == error and left["answer"] == ""
    assert right["failure"] is None and right["answer"] == ask(inspected_server, "full", False)[0]
    assert not left["marked"] and not right["marked"]


def test_playground_asks_for_a_key_and_stops(chromium, secured_server):
    chromium.open(playground_url(secured_server, max_tokens=1500))
    chromium.wait_for("!document.querySelector('#error').hidden")
    assert not chromium.evaluate("document.querySelector('#key').hidden")
    assert "API key" in chromium.evaluate("document.querySelector('#error').textContent")
    chromium.evaluate(f"document.querySelector('#api-key').value = {json.dumps(API_KEYS['bob'])}")
    chromium.evaluate("document.querySelector('#key button').click()")
    chromium.wait_for("document.querySelector('#key').hidden && document.querySelector('#error').hidden")
    chromium.evaluate("document.querySelector('#run').click()")
    chromium.wait_for("[...document.querySelectorAll('.answer')].every((answer) => answer.textContent)")
    assert chromium.evaluate("document.querySelector('#run').disabled")
    chromium.evaluate("document.querySelector('#stop').click()")
    chromium.wait_for(IS_DONE)
    columns = [read_column(chromium, side) for side in ("left", "right")]
    assert [column["failure"] for column in columns] == ["stopped"] * 2 and all(c["answer"] for c in columns)
    wait_until(lambda: not secured_server.service.admission.num_in_flight)


def test_inspector_page_follows_requests(chromium, inspected_server):
    """The newest request is shown as the page opens, and the link leads to the playground and back."""
    ask(inspected_server, "full", False)
    chromium.open(f"{root_of(inspected_server)}/inspect")
    chromium.wait_for("document.querySelectorAll('#text .token').length > 64")
    assert chromium.evaluate("document.querySelector('#text').textContent").startswith(REQUEST["prompt"])
    theme = chromium.evaluate("document.documentElement.dataset.theme")
    chromium.evaluate("document.querySelector('#theme').click()")
    for path in reversed(PAGES):
        chromium.evaluate(f"document.querySelector('header a[href=\"{path}\"]').click()")
        chromium.wait_for(f"location.pathname === '{path}' && document.readyState === 'complete'")
        assert chromium.evaluate("document.documentElement.dataset.theme") not in (theme, None)
    assert not chromium.problems
