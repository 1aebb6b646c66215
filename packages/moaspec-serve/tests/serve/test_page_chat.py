"""The page as a chat: Markdown, branches, history, files, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import browsing
from browsing import Visit
from chatpage import DONE, answering, asked, begin_answer, painted, raw_text, stored
from memorised_target import ANSWER
from serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

MARKDOWN = """# Title

Some **bold**, *slanted* and [linked](https://example.org/a_b) words.

3. One
4. Two

```python
x = 1 < 2
```

| a | b |
|---|--:|
| 1 | 2 |
"""


def questions(visited: Visit) -> list[str]:
    """All that are shown."""
    return visited.page.locator(".question").all_text_contents()


def answers(visited: Visit) -> list[str]:
    """All that are shown."""
    return visited.page.locator(".answer .text").all_text_contents()


def test_markdown_is_rendered(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited, answering(visited, MARKDOWN):
        asked(visited)
        assert visited.text(".text h4") == "Title"
        assert visited.text(".text strong") == "bold"
        assert visited.page.locator(".text li").all_text_contents() == ["One", "Two"]
        assert visited.text(".text pre") == "x = 1 < 2\n"
        assert visited.page.get_attribute(".code .bar", "data-language") == "python"
        assert visited.page.get_attribute(".text ol", "start") == "3"
        assert visited.text(".text td >> nth=1") == "2"
        assert visited.page.get_attribute(".text td >> nth=1", "align") == "right"
        link = visited.page.locator(".text a")
        assert link.get_attribute("href") == "https://example.org/a_b"
        assert link.get_attribute("target") == "_blank"
        assert raw_text(visited) == MARKDOWN
        visited.page.evaluate("window.copied = undefined")
        visited.page.click(".code >> text=Copy")
        visited.shows("window.copied !== undefined")
        assert visited.page.evaluate("window.copied") == "x = 1 < 2\n"
        assert not visited.complaints


def test_copying_without_a_clipboard(browser: Browser, local: Served) -> None:
    """Pages that did not come over HTTPS have none."""
    with browsing.visit(browser, local.url) as visited, answering(visited, "Yes."):
        asked(visited)
        visited.page.evaluate(
            "() => { Object.defineProperty(navigator, 'clipboard', { value: undefined });"
            " document.addEventListener('copy',"
            " () => { window.copied = document.getSelection().toString()"
            " || document.activeElement.value; }); }"
        )
        visited.page.click(".reply .actions >> text=Copy")
        visited.shows("window.copied === 'Yes.'")
        assert visited.text(".reply .actions").startswith("Copied")


def test_colours_stand_where_the_tokens_do(browser: Browser, local: Served) -> None:
    """Whatever Markdown leaves out of the text."""
    runs = [["target", 2], ["draft", 4], ["target", 12], ["draft", 20], ["copy", 5]]
    source = "# Abcd **ef** gh [ij](https://a.example/ij) kl\n"
    with browsing.visit(browser, local.url) as visited:
        within = visited.module("colours.js", "m.runsWithin(...a)", [runs, 4, 19])
        assert within == [["draft", 2], ["target", 12], ["draft", 1]]
        texts = ["Abcd ", "ef", " gh ", "ij", " kl"]
        found = visited.module("colours.js", "m.places(...a)", [texts, source])
        flat = [
            (char, place)
            for t, p in zip(texts, found, strict=True)
            for char, place in zip(t, p, strict=True)
        ]
        assert all(source[place] == char for char, place in flat)
        assert found[-1] == [source.index(" kl") + i for i in range(3)]
        assert visited.module("colours.js", "m.places(['&'], '&amp;')") == [[0]]
        kinds = ["draft", "draft", "draft", "copy", "target"]
        cut = visited.module("colours.js", "m.stretches('a bcd', [0, 1, 2, 3, 4], a)", kinds)
        assert cut == [["draft", 0, 1], ["draft", 2, 3], ["copy", 3, 4]]


def test_colours_in_markdown(browser: Browser, local: Served) -> None:
    text = "**aaaaa**bbbbbbb cccccc\r\n\r\n- ddddd\n- eeeee\n"
    with browsing.visit(browser, local.url) as visited, answering(visited, text):
        asked(visited)
        words = painted(visited)
        # Pieces of seven characters come from draft, draft, target and copy in turn.
        assert words["draft"] == "aaaaa bbbbb ddddd eeeee"
        assert words["copy"] == "cc"


def test_a_question_is_edited_and_both_branches_stay(browser: Browser, local: Served) -> None:
    with (
        browsing.visit(browser, local.url) as visited,
        answering(visited, "A one.", "A two.", "B one.") as bodies,
    ):
        page = visited.page
        asked(visited, "One?")
        asked(visited, "Two?", answers=2)
        page.click(".asked >> nth=0 >> text=Edit")
        assert page.evaluate("document.activeElement.value") == "One?"
        page.keyboard.press("Escape")
        assert questions(visited) == ["One?", "Two?"]
        page.click(".asked >> nth=0 >> text=Edit")
        page.fill(".edit textarea", "Other?")
        page.click(".edit >> text=Ask this instead")
        visited.shows(f"document.querySelectorAll('.reply').length === 1 && {DONE}")
        assert (questions(visited), answers(visited)) == (["Other?"], ["B one.\n"])
        assert bodies[-1]["messages"] == [{"role": "user", "content": "Other?"}]
        assert visited.text(".asked .version") == "2 of 2"
        page.click("[aria-label='Previous version']")
        assert questions(visited) == ["One?", "Two?"]
        page.reload()
        visited.shows("document.querySelectorAll('.reply').length === 2")
        assert questions(visited) == ["One?", "Two?"]
        page.click("[aria-label='Next version']")
        assert answers(visited) == ["B one.\n"]
        assert not visited.complaints


def test_an_answer_is_written_again(browser: Browser, local: Served) -> None:
    with (
        browsing.visit(browser, local.url) as visited,
        answering(visited, "One.", "Two.") as bodies,
    ):
        asked(visited)
        visited.page.click(".actions >> text=Try again")
        visited.shows(f"{DONE} && document.querySelector('.reply .version') !== null")
        assert answers(visited) == ["Two.\n"]
        assert visited.text(".reply .version") == "2 of 2"
        assert bodies[0]["messages"] == bodies[1]["messages"]
        assert bodies[0]["seed"] != bodies[1]["seed"]


@pytest.mark.parametrize("finish", ["length", None])
def test_a_cut_answer_is_continued(browser: Browser, local: Served, finish: str | None) -> None:
    """By the limit, or because the connection broke."""
    with browsing.visit(browser, local.url) as visited:
        with answering(visited, "Once upon", finish=finish, done=finish is not None):
            asked(visited, "Tell.")
        if finish is None:
            assert "connection to the server broke" in visited.text(".failure")
        assert visited.text(".reply .finish")
        with answering(visited, " a time.") as bodies:
            visited.page.click(".actions >> text=Continue")
            visited.shows(f"{DONE} && !document.querySelector('.reply .finish')")
        assert answers(visited) == ["Once upon a time.\n"]
        (body,) = bodies
        assert body["continue_final_message"] is True
        assert body["add_generation_prompt"] is False
        assert body["messages"][-1] == {"role": "assistant", "content": "Once upon"}
        assert visited.count(".actions >> text=Continue") == 0
        assert visited.count(".failure") == 0
        assert stored(visited)[0]["nodes"][-1]["text"] == "Once upon a time."


def test_conversations_are_kept_renamed_and_deleted(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited, answering(visited, "Yes."):
        page = visited.page
        page.on("dialog", lambda dialog: dialog.accept())
        asked(visited, "First?")
        page.click("#fresh")
        asked(visited, "Second?")
        page.reload()
        visited.shows("document.querySelectorAll('.reply').length === 1")
        assert questions(visited) == ["Second?"]
        page.click("#show-history")
        titles = page.locator("#chats .open")
        assert titles.all_text_contents() == ["Second?", "First?"]
        titles.nth(1).click()
        assert questions(visited) == ["First?"]
        page.click("[aria-label='Rename First?']")
        page.fill("#chats input", "A better title")
        page.keyboard.press("Enter")
        assert titles.all_text_contents() == ["Second?", "A better title"]
        page.click("[aria-label='Delete A better title']")
        assert titles.all_text_contents() == ["Second?"]
        assert questions(visited) == []
        assert page.is_visible("#intro")
        page.click("#clear-all")
        assert page.is_visible("#no-chats")
        assert stored(visited) == []
        assert not visited.complaints


def test_two_tabs_keep_their_conversations(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited, answering(visited, "Yes."):
        other = visited.page.context.new_page()
        other.goto(local.url)
        asked(visited, "First?")
        second = Visit(other)
        with answering(second, "No."):
            asked(second, "Second?")
            asked(visited, "Third?", answers=2)
        assert {len(chat["nodes"]) for chat in stored(visited)} == {2, 4}


def test_export_and_import(browser: Browser, local: Served, tmp_path: Path) -> None:
    with browsing.visit(browser, local.url) as visited, answering(visited, MARKDOWN):
        page = visited.page
        asked(visited, "Show me.")
        page.click("#show-history")
        with page.expect_download() as saved:
            page.click("#export-all")
        path = tmp_path / "chats.json"
        saved.value.save_as(path)
        (before,) = stored(visited)
        assert json.loads(path.read_text())["chats"] == [before]
        page.set_input_files("#import-file", path)
        visited.shows("document.querySelectorAll('#chats .open').length === 2")
        assert visited.text("#imported") == "Imported: 1."
        first, second = stored(visited)
        assert first["id"] != second["id"]
        assert {**first, "id": ""} == {**second, "id": ""}


def test_a_full_storage_is_said_and_the_chat_goes_on(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited, answering(visited, "Yes."):
        visited.page.evaluate(
            "() => { Storage.prototype.setItem = () => { throw new DOMException('full',"
            " 'QuotaExceededError'); }; }"
        )
        asked(visited)
        asked(visited, "And?", answers=2)
        assert "storage is full" in visited.text("#trouble")
        assert not visited.complaints


def test_odd_things_in_the_storage_do_no_harm(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        visited.page.evaluate(
            """() => {
                localStorage.setItem('moaspec-chat-a', '{');
                localStorage.setItem('moaspec-chat-b', '{"nodes": [1]}');
                localStorage.setItem('moaspec-settings', '{"temperature": "x", "limit": -1}');
                localStorage.setItem('moaspec-theme', '"><b>');
                sessionStorage.setItem('moaspec-open', 'a');
            }"""
        )
        visited.page.reload()
        visited.shows("document.querySelector('#where').textContent !== ''")
        visited.page.click("#show-settings")
        assert visited.page.input_value("#temperature") == "0"
        assert visited.page.input_value("#max-tokens") == "512"
        assert not visited.complaints


def test_settings_are_remembered_and_sent(browser: Browser, local: Served) -> None:
    typed = {"#system": "Be brief.", "#temperature": "0.7", "#top-p": "0.9", "#seed": "5"}
    with browsing.visit(browser, local.url) as visited, answering(visited, "Yes.") as bodies:
        page = visited.page
        page.click("#show-settings")
        for name, value in typed.items():
            page.fill(name, value)
        page.fill("#max-tokens", "33")
        page.uncheck("#speculation")
        page.fill("#temperature", "9")
        assert visited.text("#temperature-wrong") == "Temperature is a number from 0 to 2."
        page.fill("#seed", "1.5")
        assert visited.text("#seed-wrong").startswith("Seed is a whole number")
        page.keyboard.press("Escape")
        page.reload()
        asked(visited, "Well?")
        body = bodies[0]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        names = ("temperature", "top_p", "seed", "max_completion_tokens")
        # Invalid conversations are not imported.
        assert [body[name] for name in names] == [0.7, 0.9, 5, 33]
        assert body["moaspec"]["speculation"] is False
        page.click("#show-settings")
        page.click("#reset")
        page.keyboard.press("Escape")
        asked(visited, "And?", answers=2)
        assert bodies[1]["temperature"] == 0
        assert "top_p" not in bodies[1]
        assert bodies[1]["messages"][0]["role"] == "user"


def test_another_conversation_has_no_figures_yet(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        asked(visited)
        visited.shows("document.querySelector('#tree').children.length > 0")
        visited.page.click("#fresh")
        figures = visited.page.locator("#panel dl.figures:visible dd").all_text_contents()
        assert set(figures) == {"\u2013"}
        assert visited.text("#round-said") == "The tree of drafts appears here."
        assert visited.count("#tree > *") == 0
        assert not visited.complaints


def test_another_conversation_ends_the_answer_of_this_one(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        begin_answer(visited, "It goes on and on")
        for name in ("Edit", "Try again"):
            assert visited.page.is_disabled(f".actions >> text={name}")
        visited.page.click("#fresh")
        visited.shows(DONE)
        assert visited.page.is_visible("#intro")
        visited.shows(
            "Object.keys(localStorage).some((key) => key.startsWith('moaspec-chat-')"
            " && JSON.parse(localStorage.getItem(key)).nodes.at(-1).finish === 'stopped')"
        )


def test_a_conversation_that_is_deleted_while_it_is_written_stays_deleted(
    browser: Browser, local: Served
) -> None:
    with browsing.visit(browser, local.url) as visited:
        visited.page.on("dialog", lambda dialog: dialog.accept())
        visited.page.click("#show-history")
        begin_answer(visited, "It goes on and on")
        visited.page.click("[aria-label='Delete Go on.']")
        visited.shows(DONE)
        assert stored(visited) == []
        assert visited.page.is_visible("#no-chats")


def test_nothing_is_asked_of_others(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        urls: list[str] = []
        visited.page.on("request", lambda request: urls.append(request.url))
        visited.page.reload()
        asked(visited)
        visited.page.click("#show-history")
        visited.page.click("#show-settings")
        assert len(urls) > 10
        assert all(url.startswith(local.url) for url in urls)


def test_a_cut_answer_is_continued_by_the_server(browser: Browser, local: Served) -> None:
    """The model writes on as it would have done without the limit."""
    with browsing.visit(browser, local.url) as visited:
        limit_tokens(visited, 24)
        asked(visited)
        visited.shows("document.querySelector('.reply .finish') !== null")
        limit_tokens(visited, 400)
        visited.page.click(".actions >> text=Continue")
        visited.shows(f"{DONE} && !document.querySelector('.reply .finish')")
        assert raw_text(visited) == ANSWER


def limit_tokens(visited: Visit, number: int) -> None:
    """Set the token limit as a reader does."""
    visited.page.click("#show-settings")
    visited.page.fill("#max-tokens", str(number))
    visited.page.keyboard.press("Escape")
