"""The page of the server in headless Chromium, on a real server: what is seen equals what Python computes.

Shape suffixes: B batch rows, T tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import make_run, running
from small_runs import own_logits

from transformer_xl.evaluation.score import score
from transformer_xl.generation.generate import generate
from transformer_xl.run import Run

# markup that would run a script if it were not text, a character of two bytes, a line end
PROMPT = "a <img src=x onerror='window.broken=1'>\n<script>window.broken=1</script> caf\u00e9"
NUM_BYTES = len(PROMPT.encode())
KEY = "the-key-of-the-page-tests"
SETTINGS = {"temperature": 0.8, "top_p": 0.95, "top_k": None}  # of the page, at first


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def served(run: Run):
    with running({"tiny": run}, max_memory_length=64) as started:
        yield started


@pytest.fixture
def open_page(browser):
    """Opens pages in one browser context; afterwards, they had no error and asked no other server."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    errors: list[str] = []
    hosts: set[str] = set()

    def opened(address: object, fragment: str = "") -> Any:
        tab = context.new_page()
        tab.set_default_timeout(10_000)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text))
        tab.on("request", lambda request: hosts.add(re.sub(r"(?<=\d)/.*", "", request.url)))
        tab.goto(f"{address}/{fragment}")
        return tab

    yield opened
    context.close()
    # Chromium itself writes to the console that a key or a session was missing
    assert [error for error in errors if not re.search("the server responded with a status of 40[14]", error)] == []
    assert len(hosts) == 1


@pytest.fixture
def tab(open_page, served):
    for session in served[0].get("/v1/sessions").json()["data"]:
        served[0].delete(f"/v1/sessions/{session['id']}")
    return open_page(str(served[0].base_url).rstrip("/"))


def write(tab, text: str, max_tokens: int = 12, seed: int = 5) -> None:
    tab.fill("#max_tokens", str(max_tokens))
    if not tab.locator("#seed").is_visible():
        tab.click("summary")
    tab.fill("#seed", str(seed))
    tab.fill("#prompt", text)
    tab.keyboard.press("Control+Enter")
    finished(tab)


def finished(tab) -> None:
    tab.locator("#go:enabled").wait_for()


def selected(tab, name: str) -> None:
    tab.locator("#token-name", has_text=f"Token {name}").wait_for()


def tokens(tab, row: str = "text") -> list[str]:
    return tab.locator(f"#{row} span").all_inner_texts()


def text_of(tab) -> str:
    """The text without the signs for line ends and for the first byte of a character."""
    return "".join(tokens(tab)).replace("\u21b5\n", "\n").replace("\u00b7", "")


def bits_of(tab) -> list[float]:
    labels = tab.locator("#text span").evaluate_all("a => a.map(e => e.getAttribute('aria-label'))")
    return [float(re.search(r", ([\d.]+) bits$", label)[1]) for label in labels]


def ids_of(tab) -> list[int]:
    """The token ids of the text, from what the page keeps."""
    kept = json.loads(tab.evaluate("localStorage.getItem('transformer-xl work')"))
    nodes = {node["id"]: node for node in kept["nodes"]}
    ids: list[int] = []
    node, end = nodes.get(kept["current"]), None
    while node:
        ids = [token[0] for token in node["tokens"][:end]] + ids
        end, node = node["at"], nodes.get(node["parent"])
    return ids


def test_written_text_is_scored_and_continued_as_in_python(tab, run: Run) -> None:
    """Markup stays text, and every token has its surprisal."""
    write(tab, PROMPT)
    assert tab.evaluate("window.broken") is None
    assert tab.locator("#text img, #text script").count() == 0
    assert tab.locator("#text span.you").count() == NUM_BYTES
    ids = ids_of(tab)
    assert bytes(ids[:NUM_BYTES]).decode() == PROMPT
    assert text_of(tab).startswith(PROMPT)
    (expected,) = score(run, PROMPT)
    np.testing.assert_allclose(bits_of(tab)[:NUM_BYTES], expected.nats_K / np.log(2), atol=0.051)
    made = generate(run, PROMPT, max_new_tokens=12, seed=5, logprobs=True, **SETTINGS)
    assert ids[NUM_BYTES:] == list(made.token_ids)
    np.testing.assert_allclose(bits_of(tab)[NUM_BYTES:], -np.array(made.logprobs) / np.log(2), atol=0.051)
    # and again, without reading the text so far
    write(tab, "then", seed=6)
    assert len(ids_of(tab)) == NUM_BYTES + 12 + 4 + 12
    tab.locator("#sessions tbody tr").nth(3).wait_for()


def test_colours_are_of_the_surprisal_and_text_can_be_read(tab) -> None:
    write(tab, PROMPT)
    bits, spans = bits_of(tab), tab.locator("#text span")
    strengths = spans.evaluate_all("a => a.map(e => Number(e.style.getPropertyValue('--strength')))")
    np.testing.assert_allclose(strengths, np.clip(np.array(bits) / 12, 0, 1), atol=0.006)
    assert "bits" in tab.locator("#legend").inner_text()
    contrast = """([colour]) => {
      const span = document.querySelector("#text span");
      span.className = colour; span.style.setProperty("--strength", 1);
      const parse = (text) => text.match(/[\\d.]+/g).map(Number);
      const style = getComputedStyle(span), back = parse(getComputedStyle(document.body).backgroundColor);
      const [r, g, b, alpha = 1] = parse(style.backgroundColor);
      const mixed = [r, g, b].map((c, i) => c * alpha + back[i] * (1 - alpha));
      const luminance = (rgb) => [.2126, .7152, .0722].reduce((sum, weight, i) => {
        const c = rgb[i] / 255;
        return sum + weight * (c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
      }, 0);
      const both = [luminance(mixed), luminance(parse(style.color))].sort((x, y) => x - y);
      return [(both[1] + .05) / (both[0] + .05), alpha];
    }"""
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        for colour in ("", "less"):
            ratio, alpha = tab.evaluate(contrast, [colour])
            assert ratio >= 4.5, (scheme, colour)
            assert 0.6 < alpha < 0.7


def test_alternatives_on_hover_and_keyboard(tab, run: Run) -> None:
    write(tab, PROMPT)
    tab.locator("#text span").nth(3).hover()
    selected(tab, "3: \u2068i\u2069")
    rows = [row.split("\t") for row in tab.locator("#alternatives tbody tr").all_inner_texts()]
    assert len(rows) in (10, 11)
    probabilities = [float(row[1]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    bits = [float(row[2]) for row in rows]
    np.testing.assert_allclose(2.0 ** -np.array(bits), probabilities, rtol=0.01)
    ids_BT = torch.tensor([[run.tokenizer.bos_token_id, *PROMPT.encode()]])
    expected = own_logits(run, ids_BT)[0, 3].softmax(-1).topk(10).values
    np.testing.assert_allclose(probabilities[:10], expected, rtol=0.01)
    # the keyboard moves from token to token; Enter keeps one selected, Escape releases it
    tab.locator("#text span").nth(3).focus()
    tab.keyboard.press("ArrowRight")
    selected(tab, "4:")
    tab.keyboard.press("End")
    selected(tab, f"{NUM_BYTES + 11}:")
    tab.keyboard.press("Enter")
    tab.locator("#token-actions:visible").wait_for()
    tab.locator("#text span").nth(7).hover()
    selected(tab, f"{NUM_BYTES + 11}:")
    tab.keyboard.press("Escape")
    assert tab.locator("#token-actions").is_hidden()


def nodes(tab) -> list[str]:
    return [text[2:] for text in tab.locator("#tree button.node").all_inner_texts()]


def test_screen_readers_hear_results_only(tab) -> None:
    """Not each token while a text is generated, nor a table for each token that is pointed at."""
    tab.evaluate("""() => {
      window.said = [];
      new MutationObserver((changes) => {
        for (const { target } of changes) {
          const region = target.parentElement?.closest("[aria-live], [role=status], [role=alert]")
            ?? target.closest?.("[aria-live], [role=status], [role=alert]");
          if (region?.checkVisibility() && region.ariaLive !== "off" && region.textContent) said.push(region.id);
        }
      }).observe(document.body, { subtree: true, childList: true, characterData: true });
    }""")
    write(tab, "abc", max_tokens=60)
    assert "status" in tab.evaluate("said")
    assert len(tab.evaluate("said")) <= 4
    tab.evaluate("said.length = 0")
    for index in (3, 4):
        tab.locator("#text span").nth(index).hover()
        selected(tab, f"{index}:")
    tab.locator("#text span").nth(4).focus()
    tab.keyboard.press("ArrowRight")
    selected(tab, "5:")
    tab.keyboard.press("Enter")
    tab.locator("#text span[aria-pressed=true]").wait_for()
    assert tab.evaluate("said") == []


def test_branch_and_reroll_make_a_tree(tab, run: Run) -> None:
    """Each branch equals the text that Python generates from its beginning."""
    write(tab, PROMPT)
    first = ids_of(tab)
    tab.fill("#seed", "6")
    tab.keyboard.press("Tab")
    tab.locator("#text span").nth(NUM_BYTES + 3).click()
    tab.click("#branch")
    assert tab.locator("#text span.after").count() == 8
    assert "after token" in tab.locator("#prompt-label").inner_text()
    tab.fill("#prompt", "and")
    tab.click("#go")
    finished(tab)
    branched = ids_of(tab)
    begin = first[: NUM_BYTES + 4] + list(b"and")
    made = generate(run, list(begin), max_new_tokens=12, seed=6, **SETTINGS)
    assert branched == begin + list(made.token_ids)
    # PROMPT, what the model made of it, and a branch in that
    assert tab.locator("#tree > ul > li").count() == 4
    tab.click("#reroll")
    finished(tab)
    assert ids_of(tab)[: len(begin)] == begin
    assert ids_of(tab) != branched
    assert tab.locator("#tree ul ul button.node").count() == 2  # two texts after the same beginning
    # an alternative in place of a token, and back to the first text
    tab.locator("#text span").nth(5).click()
    selected(tab, "5:")
    other = tab.locator("#alternatives button:enabled").first
    token_id = int(other.get_attribute("data-id"))
    other.click()
    finished(tab)
    assert ids_of(tab)[:6] == [*first[:5], token_id]
    tab.locator("#tree button.node").nth(1).click()
    tab.locator(f"#text span:nth-child({len(first)}):last-child").wait_for()
    assert ids_of(tab) == first
    count = len(nodes(tab))
    tab.locator("#tree button[data-drop]").first.click()
    tab.locator("#tree .help, #tree > ul").first.wait_for()
    assert len(nodes(tab)) < count
    assert tab.locator("#text span").count() == 0


def test_deleted_session_is_read_again(tab, served, run: Run) -> None:
    """The text is in the browser, so a continuation is the same without the memory on the server."""
    write(tab, PROMPT)
    begin = ids_of(tab)
    rows = tab.locator("#sessions tbody tr")
    rows.nth(1).wait_for()
    listed = served[0].get("/v1/sessions").json()
    assert str(listed["data"][0]["tokens"]) in rows.first.inner_text()
    assert "KiB" in rows.first.inner_text()
    for left in (1, 0):
        tab.locator("#sessions button").first.click()
        rows.nth(left).wait_for(state="detached")
    assert served[0].get("/v1/sessions").json()["data"] == []
    write(tab, "then", seed=8)
    made = generate(run, begin + list(b"then"), max_new_tokens=12, seed=8, **SETTINGS)
    assert ids_of(tab) == begin + list(b"then") + list(made.token_ids)


def test_memory_with_and_without(tab, run: Run) -> None:
    write(tab, PROMPT * 2, max_tokens=0)
    tab.check("#compare")
    tab.locator("#difference span").nth(9).wait_for()
    for place, length in ((None, run.config.train.memory_length), ("End", 64)):
        if place is not None:
            tab.focus("#memory")
            tab.keyboard.press(place)
        tab.locator("#with-title", has_text=f"Memory of {length} tokens").wait_for()
        (kept,), (none,) = (score(run, PROMPT * 2, memory_length=memory) for memory in (length, 0))
        for row, result in (("with", kept), ("without", none)):
            strengths = tab.locator(f"#{row} span").evaluate_all(
                "a => a.map(e => Number(e.style.getPropertyValue('--strength')))"
            )
            np.testing.assert_allclose(strengths, np.clip(result.nats_K / np.log(2) / 12, 0, 1), atol=1e-3)
            mean = result.nats_K.mean() / np.log(2)
            assert f"{mean:.3f} bits" in tab.locator(f"#{row}-title").inner_text()
        saved = (none.nats_K - kept.nats_K) / np.log(2)
        blue = tab.locator("#difference span").evaluate_all("a => a.map(e => e.classList.contains('less'))")
        clear = np.abs(saved) > 0.01
        assert np.array_equal(np.array(blue)[clear], saved[clear] > 0)
        assert tokens(tab, "with") == tokens(tab, "difference") == tokens(tab)
    tab.locator("#without span").nth(20).hover()
    selected(tab, "20:")
    values = re.search(r"with memory ([\d.]+) bits, without ([\d.]+)", tab.locator("#token-values").inner_text())
    expected = [result.nats_K[20] / np.log(2) for result in (kept, none)]
    assert [float(values[1]), float(values[2])] == pytest.approx(expected, abs=0.006)


def test_where_a_token_looks(tab, served) -> None:
    """The mean of all heads, and each head, as the server computes them."""
    write(tab, PROMPT, max_tokens=0)
    tab.check("#attend")
    assert "Click a token" in tab.locator("#attention-title").inner_text()
    tab.focus("#text span")
    tab.keyboard.press("End")
    for _ in range(3):
        tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Enter")
    tab.locator("#attended span.query").wait_for()
    query, length = NUM_BYTES - 4, 11
    for memory in (None, 64):
        if memory is not None:
            tab.focus("#memory")
            tab.keyboard.press("End")
            length = memory
        body = {"prompt": list(PROMPT.encode()), "position": query, "memory_length": length}
        weights = np.array(served[0].post("/attention", json=body).json()["attention"])
        num_seen = min(weights.shape[-1], query + 1)  # the token that begins the text is not in it
        tab.locator(f"#attended span:nth-child({num_seen}):last-child").wait_for()
        for layer, head in ((None, None), (1, None), (1, 0)):
            if layer is not None:
                tab.select_option("#layer", str(layer))
            tab.select_option("#head", "" if head is None else str(head))
            rows = weights if layer is None else weights[layer : layer + 1]
            mean = rows.reshape(-1, rows.shape[-1]).mean(0) if head is None else rows[0, head]
            strengths = tab.locator("#attended span").evaluate_all(
                "a => a.map(e => Number(e.style.getPropertyValue('--strength')))"
            )
            np.testing.assert_allclose(strengths[::-1], (mean / mean.max())[:num_seen], atol=1e-3)
            table = [row.split("\t") for row in tab.locator("#strongest tbody tr").all_inner_texts()]
            assert len(table) == 10
            np.testing.assert_allclose([float(row[2]) for row in table], np.sort(mean)[::-1][:10], rtol=0.01)
            assert int(table[0][1]) == mean.argmax()
        tab.select_option("#layer", "")
    assert (
        f"Where token {query} (\u2068a\u2069) looks: mean of all layers, head 0"
        in tab.locator("#attention-title").inner_text()
    )
    assert tab.locator("#attended").evaluate("e => e.scrollWidth <= e.clientWidth")
    tab.locator("#attended span").nth(5).hover()
    tab.keyboard.press("Escape")
    assert "Click a token" in tab.locator("#attention-title").inner_text()
    assert tab.locator("#attended").is_hidden()


def test_work_is_kept_and_a_link_has_the_text(tab, open_page, served, browser) -> None:
    write(tab, PROMPT)
    ids, bits = ids_of(tab), bits_of(tab)
    tab.reload()
    tab.locator("#text span").nth(len(ids) - 1).wait_for()
    assert (ids_of(tab), bits_of(tab)) == (ids, bits)
    assert tab.locator("#seed").input_value() == "5"
    tab.click("#share")
    tab.locator("#link:visible").wait_for()
    link = tab.locator("#link").input_value()
    assert PROMPT.encode().hex() not in link
    # in another browser, which has nothing of this one
    other = browser.new_context()
    page = other.new_page()
    page.goto(link)
    page.locator("#text span:not(.unknown)").nth(len(ids) - 1).wait_for()
    finished(page)
    assert ids_of(page) == ids
    np.testing.assert_allclose(bits_of(page), bits, atol=0.11)
    assert page.locator("#text span.you").count() == NUM_BYTES
    assert page.evaluate("window.broken") is None
    assert "#" not in page.url
    # a damaged link, and one with something else
    for fragment in ("#t=abc", "#t=" + "q1ZKLMnIL1KyUlAqSS0uUdJRSkksSVSyMtBRykvMTVWyUkpRqgUA"):
        page.goto(f"{served[0].base_url}{fragment}".replace("/#", "/?again#"))
        page.locator("#error:visible").wait_for()
        assert "link" in page.locator("#error").inner_text()
        page.goto("about:blank")
    other.close()


def test_tabs_share_their_parts(tab, open_page, served) -> None:
    """What one tab writes or deletes, the others have too, and keep; their own text stays."""
    write(tab, "first", max_tokens=3)
    second = open_page(str(served[0].base_url).rstrip("/"))
    second.locator("#text span").nth(7).wait_for()
    write(tab, "more", max_tokens=3)
    second.click("#fresh")
    write(second, "other", max_tokens=3)
    for one in (tab, second):
        one.locator("#tree button.node").nth(5).wait_for()
    assert (text_of(tab)[:5], text_of(second)[:5]) == ("first", "other")
    tab.locator("#tree button[data-drop]").first.click()
    second.locator("#tree button.node").nth(2).wait_for(state="detached")
    for one in (tab, second):
        one.reload()
        one.locator("#tree button.node").nth(1).wait_for()
        assert len(nodes(one)) == 2
    second.close()


def test_phone_width_and_dark(tab) -> None:
    tab.emulate_media(color_scheme="dark")
    tab.set_viewport_size({"width": 390, "height": 844})
    write(tab, PROMPT + "W" * 200, max_tokens=5)
    tab.check("#compare")
    tab.locator("#difference span").nth(9).wait_for()
    tab.check("#attend")
    tab.locator("#text span").nth(9).click()
    selected(tab, "9:")
    tab.locator("#attended span.query").wait_for()
    box = tab.locator("#branch").bounding_box()  # in the window, wherever the text is
    assert 0 <= box["y"] <= 844 - box["height"]
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 20, 20)"
    # everything that can be changed has a name for screen readers
    named = "a => a.filter(e => !e.labels?.length && !e.textContent.trim() && !e.getAttribute('aria-label')).length"
    assert tab.locator("button, input, select, textarea").evaluate_all(named) == 0


def test_other_model_reads_the_same_text(open_page, run: Run, tmp_path: Path) -> None:
    """The other one has no memory, and so no choice of its length."""
    vaswani = make_run(tmp_path / "vaswani", "vaswani")
    with running({"tiny": run, "vaswani": vaswani}) as (client, _):  # no attention by distance either
        tab = open_page(str(client.base_url).rstrip("/"))
        tab.locator("#model option").first.wait_for(state="attached")
        write(tab, PROMPT, max_tokens=0)
        tab.select_option("#model", "vaswani")
        tab.locator("#text span:not(.unknown)").nth(NUM_BYTES - 1).wait_for()
        finished(tab)
        (expected,) = score(vaswani, PROMPT)
        np.testing.assert_allclose(bits_of(tab), expected.nats_K / np.log(2), atol=0.051)
        assert tab.locator("#memory-choice").is_hidden()
        assert tab.locator("#attention-choice").is_hidden()
        write(tab, "then")
        assert tab.locator("#text span").count() == NUM_BYTES + 4 + 12
        # back in the text of the first model
        tab.locator("#tree button.node").first.click()
        tab.locator(f"#text span:nth-child({NUM_BYTES}):last-child").wait_for()
        assert tab.locator("#memory-choice").is_visible()
        assert tab.locator("#model").input_value() == "tiny"
        assert text_of(tab) == PROMPT
        tab.close()


def test_stop_keeps_what_was_generated(tab, served) -> None:
    tab.fill("#max_tokens", "60000")
    tab.fill("#prompt", "abc")
    tab.click("#go")
    tab.locator("#text span").nth(10).wait_for()  # while it is streamed
    assert tab.locator("#go").is_disabled()
    tab.click("#stop")
    finished(tab)
    assert len(ids_of(tab)) == tab.locator("#text span").count() < 60_000
    assert tab.locator("#error").is_hidden()


def test_key_is_asked_for_and_not_kept(open_page, run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    with running({"tiny": run}, api_key_file=str(tmp_path / "keys")) as (client, _):
        tab = open_page(str(client.base_url).rstrip("/"))
        for message, key in (("is needed", "a-key-that-the-server-does-not-know"), ("is not known", KEY)):
            tab.locator("#error", has_text=message).wait_for()
            # looking at the page hides neither the error nor the form, and nothing can be written without a key
            tab.locator("#text").hover()
            tab.focus("#prompt")
            tab.keyboard.press("Shift")
            assert message in tab.locator("#error:visible").inner_text()
            with tab.expect_response("**/v1/models"):
                tab.keyboard.press("Control+Enter")
            tab.locator("#error", has_text=message).wait_for()
            tab.fill("#key-value", key)
            tab.click("#key button")
        tab.locator("#model option").wait_for(state="attached")
        write(tab, "abc")
        assert tab.locator("#key").is_hidden()
        assert tab.locator("#text span").count() == 15
        assert KEY not in tab.evaluate("JSON.stringify(localStorage)")
        tab.close()


def test_page_is_served_with_a_content_security_policy(served) -> None:
    client = served[0]
    for path in ("/", "/page/page.css", "/page/page.js", "/page/attention.js", "/page/server.js", "/page/work.js"):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:" in policy
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://", answer.text)
    assert client.get("/page/../app.py").status_code == 404
