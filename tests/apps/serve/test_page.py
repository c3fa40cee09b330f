"""The page of the server in headless Chromium, on a real server: what is seen equals what Python computes.

Shape suffixes: B batch rows, T tokens, K tokens of a text.
"""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import LOSSY, make_run, running
from small_runs import own_logits

from transformer_xl.evaluation.score import score
from transformer_xl.generation.generate import generate
from transformer_xl.run import Run

# markup that would run a script if it were not text, a character of two bytes, a line end
PROMPT = "a <img src=x onerror='window.broken=1'>\n<script>window.broken=1</script> caf\u00e9"
NUM_BYTES = len(PROMPT.encode())
LONG = PROMPT * 2  # is read in parts
LENGTHS = (0, 8, 11, 16, 32)  # of memory, on the slider
# a text for these tokenizers, and what its second word is for the model
TYPED = {
    "word": ("the  zebra sat\n on the ", "<unk>"),
    "integer": ("3  007 11\n 5 30 ", "7"),
    "unigram": ("the  \u4e2d\u6587 sat\n on the ", "<unk>"),
    "word piece": ("the  CAF\u00c9 sat\n \u4e2d the ", "cafe"),
}
KEY = "the-key-of-the-page-tests"
SETTINGS = {"temperature": 0.8, "top_p": 0.95, "top_k": None}  # of the page, at first
AXE = Path(__file__).parents[3] / ".venv/npm/node_modules/axe-core/axe.min.js"

# what is kept of the text of this tab: its ids, and bits by memory length
KEPT = """async () => {
  const request = indexedDB.open("transformer-xl");
  const result = (one) => new Promise((resolve) => { one.onsuccess = () => resolve(one.result); });
  const database = await result(request);
  const all = await result(database.transaction("parts").objectStore("parts").getAll());
  const parts = new Map(all.map((part) => [part.id, part]));
  const text = { ids: [], bits: {}, kinds: "" };
  const path = [];
  let part = parts.get(Number(sessionStorage.getItem("transformer-xl text")));
  for (let end = part?.ids.length; part; end = part.at, part = parts.get(part.parent)) path.unshift([part, end]);
  for (const [{ ids, bits, kind }, end] of path) {
    text.ids.push(...ids.slice(0, end));
    text.kinds += kind[0].repeat(end);
    for (const memory in bits) (text.bits[memory] ??= []).push(...bits[memory].slice(0, end));
  }
  database.close();
  return text;
}"""
# what another version, or a foe, could have left: two parts can be read, and one names no model here
HOSTILE = """async () => {
  const request = indexedDB.open("transformer-xl");
  const database = await new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const parts = database.transaction("parts", "readwrite").objectStore("parts");
  const markup = "<img src=x onerror='window.broken=1'>";
  const part = { parent: null, at: 0, kind: "you", model: "tiny", seed: null, ids: [97], bits: {}, rough: [],
    sessions: [] };
  parts.put({ ...part, id: 1, ids: [markup] });
  parts.put({ ...part, id: 2, parent: 1 });
  parts.put({ ...part, id: 3, kind: markup });
  parts.put({ ...part, id: 4, model: markup });
  parts.put({ id: 5 });
  parts.put({ ...part, id: 6, sessions: [{ memory: 0, at: 0, id: `../../${markup}` }] });
  parts.put({ ...part, id: 9, texts: [markup, markup] });
  parts.put({ ...part, id: 7, parent: 8 }); // a cycle
  parts.put({ ...part, id: 8, parent: 7 });
  await new Promise((resolve) => { parts.transaction.oncomplete = resolve; });
  database.close();
}"""
# the paint of each character that is shown
PAINTED = """() => {
  const paints = [], starts = new Map();
  for (const line of document.querySelectorAll(".line")) {
    starts.set(line, paints.length);
    for (const _ of line.textContent) paints.push("");
    paints.push(line.dataset.paint ?? "");
  }
  for (const [name, ranges] of CSS.highlights) {
    for (const range of name === "model" ? [] : ranges) {
      const start = starts.get(range.startContainer.parentElement.closest(".line"));
      for (let at = range.startOffset; at < range.endOffset; at++) paints[start + at] = name;
    }
  }
  return paints.slice(0, -1);
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def served(run: Run):
    with running({"tiny": run}, max_memory_length=32) as started:
        yield started


@pytest.fixture
def open_page(browser):
    """Opens pages in one browser context; afterwards, they had no error and asked no other server."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, has_touch=True)
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
    for tab in context.pages:  # pytest shows it if the test has failed
        print(tab.locator("#status, #error, #go").all_inner_texts(), errors)
    context.close()
    # Chromium itself writes to the console that a key or a session was missing, or a request was stopped by the test
    expected = (
        "the server responded with a status of 40[14]|net::ERR_(FAILED|CONNECTION_REFUSED|INCOMPLETE_CHUNKED_ENCODING)"
    )
    assert [error for error in errors if not re.search(expected, error)] == []
    assert len([host for host in hosts if not host.startswith("blob:")]) == 1


@pytest.fixture
def tab(open_page, served):
    opened = open_page(str(served[0].base_url).rstrip("/"))
    opened.locator("#model option").first.wait_for(state="attached")
    return opened


def settled(tab) -> None:
    """Wait until all is read."""
    tab.locator("#text[aria-busy=false]").wait_for()


def write(tab, text: str) -> None:
    """Put text where the cursor is."""
    tab.focus("#text")
    tab.keyboard.insert_text(text)
    settled(tab)


def go_on(tab, max_tokens: int = 12, seed: int = 5) -> None:
    """Let the model continue at the cursor, by the keyboard."""
    tab.fill("#max_tokens", str(max_tokens))
    if not tab.locator("#seed").is_visible():
        tab.click("#sampling summary")
    tab.fill("#seed", str(seed))
    tab.keyboard.press("Tab")
    tab.focus("#text")
    # it may have ended before one can look
    tab.evaluate(
        """() => {
          const go = document.querySelector("#go");
          window.began = false;
          const look = () => { window.began ||= go.textContent.startsWith("Stop"); };
          new MutationObserver(look).observe(go, { childList: true });
        }"""
    )
    tab.keyboard.press("Control+Enter")
    tab.wait_for_function("() => window.began")
    settled(tab)


def shown(tab, selector: str, value: str = "textContent") -> list[str]:
    """What every such element shows; at one moment, as the page puts new ones in the place of what a locator found."""
    return tab.evaluate(f"selector => Array.from(document.querySelectorAll(selector), one => one.{value})", selector)


def text_of(tab) -> str:
    return "\n".join(shown(tab, ".line"))


def kept(tab) -> dict[str, Any]:
    return tab.evaluate(KEPT)  # after what the page has begun to write, as transactions are in order


def tokens(tab, number: int) -> None:
    """Wait until a text of so many tokens is shown."""
    tab.locator("#status", has_text=re.compile(f"^{number:,} tokens?\\b")).wait_for()


def written(tab, number: int) -> None:
    """Wait until the text has so many tokens, or more."""
    count = "parseInt(document.getElementById('status').textContent.replaceAll(',', ''))"
    tab.wait_for_function(f"number => {count} >= number", arg=number)


def ids_of(tab) -> list[int]:
    return kept(tab)["ids"]


def levels(tab) -> list[float]:
    """The strength of the paint of each character, from 0 to 12, with a sign: of blue it is positive, else negative."""
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    signs = {"high": -1, "saves": 1, "looks": 1, "": 0}
    split = [paint.partition("-") for paint in tab.evaluate(PAINTED)]
    return [signs[hue] * int(level or 0) for hue, _, level in split]


def bits(run: Run, text: str | list[int], memory: int = 11) -> np.ndarray:
    (scored,) = score(run, text if isinstance(text, str) else bytes(text), memory_length=memory)
    return scored.nats_K / np.log(2)


def by_character(text: str, values_K: np.ndarray) -> np.ndarray:
    """The sum over the bytes of each character."""
    sizes = [len(character.encode()) for character in text]
    return np.add.reduceat(values_K, np.cumsum([0, *sizes[:-1]]))


def spot(tab, index: int) -> tuple[float, float]:
    """The middle of a character of the first line, in the window."""
    box = tab.evaluate(
        """(index) => {
          const range = document.createRange(), node = document.querySelector(".line").firstChild;
          range.setStart(node, index), range.setEnd(node, index + 1);
          const { x, y, width, height } = range.getBoundingClientRect();
          return [x + width * 0.4, y + height / 2];
        }""",
        index,
    )
    return box[0], box[1]


def chosen(tab, name: str) -> None:
    tab.locator("#token-name", has_text=f"Token {name}").wait_for()


def bars(tab, name: str) -> list[tuple[str, float]]:
    """The labels of a list of bars, and the numbers that are first beside them."""
    rows = [row.rsplit("\n", 1) for row in shown(tab, f"#{name} li", "innerText")]
    return [(label.strip(), float(re.split("[, ]", value)[0])) for label, value in rows]


def test_typed_text_is_scored_and_continued_as_in_python(tab, run: Run) -> None:
    """Markup stays text; every token has the surprisal of `score` with every memory length."""
    write(tab, PROMPT)
    assert tab.evaluate("window.broken") is None
    assert tab.locator("#text img, #text script").count() == 0
    assert text_of(tab) == PROMPT
    own = kept(tab)
    assert bytes(own["ids"]).decode() == PROMPT
    assert sorted(map(int, own["bits"])) == list(LENGTHS)
    for memory in LENGTHS:
        np.testing.assert_allclose(own["bits"][str(memory)], bits(run, PROMPT, memory), atol=1e-3)
    go_on(tab, seed=7)  # not 5, whose text runs from right to left, where keys go the other way
    ids = ids_of(tab)
    made = generate(run, PROMPT, max_new_tokens=12, seed=7, **SETTINGS)
    assert ids[NUM_BYTES:] == list(made.token_ids)
    # and again, after text that is typed in the middle of a line by keys, then deleted
    tab.keyboard.type("thhen")
    for _ in range(2):
        tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Backspace")
    tab.keyboard.press("Control+End")
    settled(tab)
    assert ids_of(tab) == [*ids, *b"then"]
    tab.keyboard.press("Control+z")
    settled(tab)
    assert ids_of(tab) == [*ids, *b"thhen"]
    tab.keyboard.press("Control+y")
    settled(tab)
    own = kept(tab)
    assert (own["ids"], own["kinds"]) == ([*ids, *b"then"], "y" * NUM_BYTES + "m" * 12 + "y" * 4)


@pytest.mark.parametrize("name", TYPED)
def test_text_is_as_it_was_typed_where_tokens_do_not_restore_it(open_page, tmp_path: Path, name: str) -> None:
    """Its tokens are those of the whole text, whatever pauses there were; what joins a word of the model is one."""
    tokenizer, (typed, read) = LOSSY[name], TYPED[name]
    run = make_run(tmp_path / "run", tokenizer=tokenizer)
    with running({"tiny": run}) as (client, _):
        tab = open_page(str(client.base_url).rstrip("/"))
        tab.locator("#note:visible").wait_for()
        for begin in range(0, len(typed), 4):
            write(tab, typed[begin : begin + 4])
            assert text_of(tab) == typed[: begin + 4]
        ids = tokenizer.encode(typed).tolist()
        assert ids_of(tab) == ids
        (expected,) = score(run, typed)
        np.testing.assert_allclose(kept(tab)["bits"]["11"], expected.nats_K[: len(ids)] / np.log(2), atol=1e-3)
        tab.keyboard.type(word := " 11" if name == "integer" else "cat")
        settled(tab)
        assert ids_of(tab) == tokenizer.encode(typed + word).tolist()
        for _ in word:
            tab.keyboard.press("Control+z")
        settled(tab)
        assert (text_of(tab), ids_of(tab)) == (typed, ids)
        go_on(tab)
        made = generate(run, typed, max_new_tokens=12, seed=5, **SETTINGS)
        written = text_of(tab)
        assert (written, ids_of(tab)) == (typed + made.text.removeprefix(" "), [*ids, *made.token_ids])
        tab.keyboard.type(word)
        settled(tab)
        assert text_of(tab) == written + word
        last = tokenizer.encode((written + word).split()[-1])
        assert tokenizer.decode(ids_of(tab)).split()[-1] == tokenizer.decode(last)
        own = kept(tab)
        tab.click("#share")
        tab.locator("#link:visible").wait_for()
        link = tab.locator("#link").input_value()
        for number, open_again in enumerate((tab.reload, lambda link=link: tab.goto(link))):
            open_again()
            tab.locator("#tree > ul > li").nth(number).wait_for()
            tokens(tab, len(own["ids"]))
            settled(tab)
            assert text_of(tab) == written + word
            assert [kept(tab)[name] for name in ("ids", "kinds")] == [own["ids"], own["kinds"]]
        # a token is called what it is for the model, and another one comes with its space
        tab.mouse.click(*spot(tab, 5))
        tab.locator("#token-name", has_text=f": \u2068{read}\u2069").wait_for()
        tab.locator("#alternatives button:enabled").first.click()
        tab.locator("#status", has_text=re.compile(r"^[23] tokens")).wait_for()
        settled(tab)
        assert text_of(tab).split() == tokenizer.decode(ids_of(tab)).split()
        tab.close()


def test_white_space_that_is_typed_first_stays(open_page, tmp_path: Path) -> None:
    """Alone it has no token of a word tokenizer with which it could be kept."""
    with running({"tiny": make_run(tmp_path / "run", tokenizer=LOSSY["word"])}) as (client, _):
        tab = open_page(str(client.base_url).rstrip("/"))
        tab.locator("#note:visible").wait_for()
        tab.focus("#text")
        with tab.expect_response("**/tokenize"):
            tab.keyboard.insert_text(" \t ")
        tab.wait_for_timeout(100)  # until the page has read the answer
        assert text_of(tab) == " \t "
        tab.keyboard.press("Backspace")
        write(tab, "the")
        assert text_of(tab) == " \tthe"
        assert ids_of(tab) == LOSSY["word"].encode("the").tolist()
        tab.close()


def test_long_text_is_read_in_parts_and_again_without_the_server(tab, served, run: Run) -> None:
    """The sums are those of one reading; sessions are only what saves reading again."""
    for session in served[0].get("/v1/sessions").json()["data"]:
        served[0].delete(f"/v1/sessions/{session['id']}")
    write(tab, LONG)
    go_on(tab)
    ids = ids_of(tab)
    made = generate(run, LONG, max_new_tokens=12, seed=5, **SETTINGS)
    assert ids == [*LONG.encode(), *made.token_ids]
    for memory in LENGTHS:
        np.testing.assert_allclose(kept(tab)["bits"][str(memory)], bits(run, ids, memory), atol=1e-3)
    listed = served[0].get("/v1/sessions").json()["data"]
    assert len(listed) == 2 * (len(LENGTHS) - 1)
    served[0].post("/v1/sessions", json={"model": "tiny"})  # of another program
    assert tab.locator("#sessions").is_hidden()  # folded
    tab.click("#sessions-total")
    rows = tab.locator("#sessions tbody tr")
    rows.nth(len(listed) - 1).wait_for()
    assert rows.count() == len(listed)
    assert "KiB" in rows.first.inner_text()
    rows.first.locator("button").click()
    rows.nth(len(listed) - 1).wait_for(state="detached")
    for session in served[0].get("/v1/sessions").json()["data"]:
        served[0].delete(f"/v1/sessions/{session['id']}")
    tab.focus("#text")
    tab.keyboard.press("Control+End")
    write(tab, "then")
    go_on(tab, seed=8)
    made = generate(run, [*ids, *b"then"], max_new_tokens=12, seed=8, **SETTINGS)
    assert ids_of(tab) == [*ids, *b"then", *made.token_ids]
    np.testing.assert_allclose(kept(tab)["bits"]["11"], bits(run, ids_of(tab)), atol=1e-3)
    # alternatives far into it, of which only what the token sees is read
    chosen(tab, f"{len(ids) + 15}:") if tab.locator("#token-actions").is_visible() else tab.keyboard.press("ArrowRight")
    tab.locator("#alternatives li").first.wait_for()
    logits = own_logits(run, torch.tensor([[run.tokenizer.bos_token_id, *ids_of(tab)]]))[0, -2]
    expected = logits.softmax(-1).topk(10).values
    np.testing.assert_allclose([value for _, value in bars(tab, "alternatives")][:10], expected, rtol=0.01)


def test_three_paintings_by_key_mouse_and_touch(tab, served, run: Run) -> None:
    """Their strengths are those of `score` and of the server's attention; the slider needs no request."""
    write(tab, PROMPT)
    kept_bits, none = (by_character(PROMPT, bits(run, PROMPT, memory)) for memory in (11, 0))
    np.testing.assert_allclose(levels(tab), -np.minimum(12, kept_bits), atol=0.51)
    tab.click("text=What memory saves")
    np.testing.assert_allclose(levels(tab), np.clip(3 * (none - kept_bits), -12, 12), atol=0.51)
    mean = [bits(run, PROMPT, memory).mean() for memory in (11, 0)]
    word = "saves" if mean[0] <= mean[1] else "costs"
    assert f"{word} {abs(mean[1] - mean[0]):.2f} of {mean[1]:.2f} bits" in tab.locator("#finding").inner_text()
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.focus("#memory")
    tab.keyboard.press("End")
    longest = by_character(PROMPT, bits(run, PROMPT, 32))
    np.testing.assert_allclose(levels(tab), np.clip(3 * (none - longest), -12, 12), atol=0.51)
    tab.focus("#text")
    tab.keyboard.press("Alt+ArrowDown")
    tab.keyboard.press("Alt+1")
    shorter = by_character(PROMPT, bits(run, PROMPT, 16))
    np.testing.assert_allclose(levels(tab), -np.minimum(12, shorter), atol=0.51)
    titles = shown(tab, "#curve title")
    means = {memory: f"{bits(run, PROMPT, memory).mean():.3f}" for memory in LENGTHS}
    assert titles == [f"memory of {memory} tokens: {mean} bits per token" for memory, mean in means.items()]
    tab.locator("#curve circle[data-memory='11']").click()
    assert "11 tokens" in tab.locator("#memory-title").inner_text()
    assert requests == []
    tab.locator("text=Where a token looks").tap()
    assert "tap a token" in tab.locator("#finding").inner_text()
    assert levels(tab) == [0] * len(PROMPT)
    tab.touchscreen.tap(*spot(tab, 30))
    for layer, head in (("", ""), ("1", ""), ("1", "0")):
        tab.locator("#looks li").first.wait_for()
        tab.select_option("#layer", layer)
        tab.select_option("#head", head)
        body = {"prompt": list(PROMPT.encode()), "position": 30}
        weights = np.array(served[0].post("/attention", json=body).json()["attention"])
        rows = weights if layer == "" else weights[int(layer) : int(layer) + 1]
        mean_K = rows.reshape(-1, rows.shape[-1]).mean(0) if head == "" else rows[0, int(head)]
        seen = np.zeros(len(PROMPT))
        seen[31 - min(31, len(mean_K)) : 31] = (12 * mean_K / mean_K.max())[:31][::-1]
        np.testing.assert_allclose(levels(tab), seen, atol=0.51)
        np.testing.assert_allclose([value for _, value in bars(tab, "looks")], np.sort(mean_K)[::-1][:10], rtol=0.1)
    assert "Token 30 (\u2068" in tab.locator("#finding").inner_text()
    tab.locator("#release").tap()
    assert "tap a token" in tab.locator("#finding").inner_text()


def test_alternatives_by_mouse_keyboard_and_touch(tab, run: Run) -> None:
    write(tab, PROMPT)
    tab.mouse.move(*spot(tab, 3))
    tip = tab.locator("#tip:visible").inner_text()
    assert f"{bits(run, PROMPT)[3]:.1f} bits" in tip
    tab.mouse.click(*spot(tab, 3))
    chosen(tab, "3: \u2068i\u2069")
    tab.locator("#alternatives li").first.wait_for()
    values = [value for _, value in bars(tab, "alternatives")]
    assert len(values) in (10, 11)
    assert values == sorted(values, reverse=True)
    ids_BT = torch.tensor([[run.tokenizer.bos_token_id, *PROMPT.encode()]])
    expected = own_logits(run, ids_BT)[0, 3].softmax(-1).topk(10).values
    np.testing.assert_allclose(values[:10], expected, rtol=0.01)
    assert tab.locator("#boxes div").count() == 1
    tab.keyboard.press("Control+Home")
    chosen(tab, "0:")
    tab.keyboard.press("ArrowRight")
    chosen(tab, "1:")
    tab.keyboard.press("Control+End")
    # a character of two tokens; both can be chosen
    chosen(tab, f"{NUM_BYTES - 1}:")
    tab.locator("#token-parts button").first.click()
    chosen(tab, f"{NUM_BYTES - 2}:")
    tab.keyboard.press("Escape")
    tab.locator("#token-name", has_text="No token").wait_for()
    # one is taken instead, by touch, and the model goes on from there by a click
    tab.touchscreen.tap(*spot(tab, 5))
    chosen(tab, "5:")
    other = tab.locator("#alternatives button:enabled").first
    other.wait_for()
    token_id = int(other.get_attribute("data-id"))
    other.tap()
    tokens(tab, 6)
    settled(tab)
    assert ids_of(tab) == [*PROMPT.encode()[:5], token_id]
    tab.fill("#max_tokens", "9")
    tab.click("#go")
    tokens(tab, 15)


def test_typing_stops_the_model_and_undo_takes_its_text_back_at_once(tab) -> None:
    write(tab, "abc")
    tab.fill("#max_tokens", "60000")
    tab.focus("#text")
    tab.keyboard.press("Control+Enter")
    written(tab, 30)
    assert "until you type" in tab.locator("#status").inner_text()
    tab.keyboard.type("xy")
    settled(tab)
    texts = [kept(tab)]
    assert re.fullmatch("yyym{27,}yy", texts[0]["kinds"])
    assert bytes(texts[0]["ids"][-2:]) == b"xy"
    for _ in range(4):  # each key, the continuation, the beginning
        tab.keyboard.press("Control+z")
        settled(tab)
        texts.append(kept(tab))
    ids = texts[0]["ids"]
    assert [text["ids"] for text in texts] == [ids, ids[:-1], ids[:-2], ids[:3], []]
    for key, number, expected in (("y", 4, ids), ("z", 3, ids[:3])):  # without a pause
        for _ in range(number):
            tab.keyboard.press(f"Control+{key}")
        settled(tab)
        assert ids_of(tab) == expected
    # before the first token, in the middle: what follows is there again
    tab.route("**/completions", lambda route: None)  # is never answered
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Control+Enter")
    tab.locator("#go", has_text="Stop").wait_for()
    assert text_of(tab) == "a"
    tab.keyboard.type("-")
    tab.locator("#go", has_text="Continue").wait_for()  # until then the model's request may not have been sent
    tab.unroute("**/completions")
    settled(tab)
    assert bytes(ids_of(tab)) == b"a-bc"
    assert tab.locator("#error").is_hidden()


def nodes(tab) -> list[str]:
    return [text[2:] for text in shown(tab, "#tree button.node", "innerText")]


def test_branches_are_a_fork(tab, run: Run) -> None:
    """Each branch equals the text that Python generates from its beginning; new texts are apart."""
    write(tab, PROMPT)
    go_on(tab)
    first = ids_of(tab)
    assert len(nodes(tab)) == 1
    tab.mouse.click(*spot(tab, 20))
    tab.locator("#token-actions:visible").wait_for()
    tab.click("#branch")
    tab.locator("#tree ul ul button.node").wait_for()
    settled(tab)
    made = generate(run, first[:21], max_new_tokens=12, seed=5, **SETTINGS)
    assert ids_of(tab) == [*first[:21], *made.token_ids]
    label = nodes(tab)[1]
    assert label.startswith("at 21: ")
    assert "(12 tokens)" in label
    tab.click("#reroll")
    tab.locator("#tree ul ul button.node").nth(1).wait_for()
    settled(tab)
    assert ids_of(tab)[:21] == first[:21]
    # typing within what the model wrote makes a branch, which further typing changes
    tab.locator("#tree button.node").first.click()
    tokens(tab, len(first))
    settled(tab)
    tab.focus("#text")
    tab.keyboard.press("Control+Home")
    for character in "xy":
        tab.keyboard.type(character)
        settled(tab)
    assert text_of(tab).startswith(f"xy{PROMPT[:20]}")
    assert ids_of(tab) == [*b"xy", *first]
    assert len(nodes(tab)) == 4
    tab.click("#fresh")
    write(tab, "apart")
    assert tab.locator("#tree > ul > li").count() == 3  # what begins with xy has no token of the first
    tab.locator("#tree button.node").first.click()
    tokens(tab, len(first))
    assert ids_of(tab) == first
    tab.locator("#tree button[data-drop]").first.click()
    tab.locator("#tree > ul > li").nth(2).wait_for(state="detached")
    assert text_of(tab) == ""


def test_screen_readers_hear_results_only(tab) -> None:
    """Not each token while a text is generated, nor the values of each token that is chosen."""
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
    write(tab, "abc")
    go_on(tab, max_tokens=20)
    assert "status" in tab.evaluate("said")
    assert len(tab.evaluate("said")) <= 10
    tab.evaluate("said.length = 0")
    tab.keyboard.press("Control+Home")
    chosen(tab, "0:")
    tab.locator("#alternatives li").first.wait_for()
    assert set(tab.evaluate("said")) <= {"status"}


def test_what_is_shown_cannot_be_reordered(tab) -> None:
    """Control characters are signs of the same length; what is copied has them as they are."""
    text = "a\u202eb\u2066c\x00d\x1be\u200bf\tg\uffff"
    write(tab, text)
    assert text_of(tab) == "a\u21c4b\u21c4c\u2400d\u241be\u25aff\tg\u25af"
    xs = [spot(tab, index)[0] for index in range(len(text))]
    assert xs == sorted(xs)
    tab.keyboard.press("Control+a")
    copied = """() => {
      const data = new DataTransfer();
      const event = new ClipboardEvent("copy", { clipboardData: data, cancelable: true });
      document.getElementById("text").dispatchEvent(event);
      return data.getData("text/plain");
    }"""
    assert tab.evaluate(copied) == text
    tab.keyboard.press("End")
    assert tab.evaluate(copied.replace("return", "return event.defaultPrevented ||")) == ""
    tab.keyboard.press("Control+a")
    tab.keyboard.press("Delete")
    settled(tab)
    assert text_of(tab) == ""
    tab.locator("#examples button").first.wait_for()
    # what makes an emoji or joins letters stays; what is not seen does not
    seen = "\U0001f469\u200d\U0001f4bb \u2764\ufe0f 1\ufe0f\u20e3 \u0645\u06cc\u200c\u062e "
    signs = "\u25af" * 8
    write(tab, f"{seen}\U0001f469\u200d x\ufe0fy\U000e0041\u3164\u115f\u1160\uffa0\u00ad\u200c")
    assert text_of(tab) == f"{seen}\U0001f469\u25af x\u25afy{signs}"
    # an input method writes a character of three bytes in a line
    tab.keyboard.press("Control+a")
    write(tab, "one two")
    tab.keyboard.press("Home")
    session = tab.context.new_cdp_session(tab)
    session.send("Input.imeSetComposition", {"text": "\u4e2d", "selectionStart": 1, "selectionEnd": 1})
    session.send("Input.insertText", {"text": "\u4e2d\u6587"})
    settled(tab)
    assert text_of(tab) == "\u4e2d\u6587one two"
    assert bytes(ids_of(tab)).decode() == "\u4e2d\u6587one two"
    tab.keyboard.press("Home")
    tab.keyboard.press("Enter")
    settled(tab)
    assert text_of(tab) == "\n\u4e2d\u6587one two"


def test_text_is_followed_unless_the_reader_has_scrolled_away(tab) -> None:
    """While it is written, and a stopped text stays."""
    tab.fill("#max_tokens", "60000")
    write(tab, "abc\n" * 22)
    bottom = "(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.getElementById('scroller'))"
    tab.click("#go")
    written(tab, 200)
    assert tab.evaluate(bottom) < 60
    tab.evaluate("document.getElementById('scroller').scrollTop = 0")
    written(tab, int(re.sub(r",|\D.*", "", tab.locator("#status").inner_text())) + 60)
    assert tab.evaluate("document.getElementById('scroller').scrollTop") == 0
    tab.keyboard.press("Escape")
    tab.locator("#go", has_text="Continue").wait_for()
    number = len(ids_of(tab))
    assert 88 < number < 60_000
    assert f"{number:,} tokens" in tab.locator("#status").inner_text()
    assert tab.locator("#error").is_hidden()


def test_errors_can_be_tried_again_and_examples_say_what_memory_saves(tab) -> None:
    """The text and the focus are as they were; an example then opens in its place."""
    tab.route("**/v1/completions", lambda route: route.abort())
    tab.focus("#text")
    tab.keyboard.insert_text("abc")
    tab.locator("#error", has_text="does not answer").wait_for()
    assert text_of(tab) == "abc"
    tab.unroute("**/v1/completions")
    tab.click("#retry")
    tab.locator("#status", has_text="bits per token").wait_for()
    assert tab.locator("#error").is_hidden()
    assert tab.evaluate("document.activeElement.id") == "text"
    # from the address alone: a click, and a sentence names words, which can be gone to
    tab.click("#fresh")
    assert "memory" in tab.locator("#start p").first.inner_text()
    assert tab.locator("#examples button").count() == 3
    tab.locator("#examples button").first.click()
    word = tab.locator("#finding button").first
    word.wait_for()
    assert re.search(
        r"Memory of 11 tokens (saves|costs) [\d.]+ of [\d.]+ bits per token", tab.locator("#finding").inner_text()
    )
    assert tab.locator("#paints input:checked").get_attribute("value") == "memory"
    word.click()
    tab.locator("#token-values", has_text="memory saves").wait_for()
    assert tab.locator("#boxes div").count() >= 1


def test_work_is_kept_and_a_link_has_the_text(tab, served, browser) -> None:
    write(tab, PROMPT)
    go_on(tab)
    tab.evaluate(HOSTILE)
    own = kept(tab)
    tab.reload()
    tokens(tab, len(own["ids"]))
    settled(tab)
    assert kept(tab) == own
    other = "1 token that no model here can read, of <img src=x onerror='window.broken=1'>"
    assert sorted(nodes(tab)[:3]) == [other, *["\u2068a\u2069 (1 token)"] * 2]
    assert len(nodes(tab)) == 4
    assert tab.evaluate("window.broken") is None
    assert tab.locator("#seed").input_value() == "5"
    tab.keyboard.press("Alt+2")
    with tab.expect_download() as download:
        tab.click("#picture")
    assert tab.evaluate("document.activeElement.id") == "text"
    picture = ET.parse(download.value.path()).getroot()
    assert {node.tag.rpartition("}")[2] for node in picture.iter()} == {"svg", "rect", "text"}
    shown = "".join(node.text for node in picture.iter() if node.tag.endswith("text") and len(node.text or "") < 3)
    assert PROMPT[:30].replace(" ", "") in shown
    tab.click("#share")
    tab.locator("#link:visible").wait_for()
    link = tab.locator("#link").input_value()
    assert PROMPT.encode().hex() not in link
    # in another browser, which has nothing of this one
    other = browser.new_context()
    page = other.new_page()
    page.goto(link)
    tokens(page, len(own["ids"]))
    settled(page)
    linked = kept(page)
    assert (linked["ids"], linked["kinds"]) == (own["ids"], own["kinds"])
    np.testing.assert_allclose(linked["bits"]["11"], own["bits"]["11"], atol=1e-3)
    assert page.locator("#paints input:checked").get_attribute("value") == "memory"
    assert page.evaluate("window.broken") is None
    assert "#" not in page.url
    # a damaged link, and one with something else
    for fragment in ("#t=abc", "#t=" + "q1ZKLMnIL1KyUlAqSS0uUdJRSkksSVSyMtBRykvMTVWyUkpRqgUA"):
        page.goto(f"{served[0].base_url}{fragment}".replace("/#", "/?again#"))
        page.locator("#error:visible").wait_for()
        assert "link" in page.locator("#error").inner_text()
        page.goto("about:blank")
    other.close()


def test_leaving_the_page_loses_nothing(tab) -> None:
    """Neither what has no tokens yet, nor what the model has written so far."""
    tab.focus("#text")
    tab.keyboard.insert_text("typed")
    tab.reload()
    tokens(tab, 5)
    settled(tab)
    assert text_of(tab) == "typed"
    tab.fill("#max_tokens", "5000")
    tab.keyboard.press("Tab")
    tab.focus("#text")
    tab.keyboard.press("Control+Enter")
    written(tab, 10)
    before = text_of(tab)
    tab.reload()
    written(tab, 10)
    assert text_of(tab).startswith(before)


def test_without_a_store_and_after_a_key_that_is_not_ascii(open_page, served) -> None:
    tab = open_page(str(served[0].base_url).rstrip("/"))
    tab.evaluate("sessionStorage.setItem('transformer-xl key', 'caf\u00e9')")
    tab.reload()
    tab.locator("#key:visible").wait_for()
    denied = "get() { throw new DOMException('denied', 'SecurityError'); }"
    tab.add_init_script(
        f"for (const name of ['sessionStorage', 'indexedDB']) Object.defineProperty(window, name, {{ {denied} }})"
    )
    tab.reload()
    tab.locator("#error", has_text="keeps no work").wait_for()
    write(tab, "abc")
    tokens(tab, 3)


def test_tabs_share_their_parts(tab, open_page, served) -> None:
    """What one tab writes or deletes, the others have too, and keep; their own text stays."""
    write(tab, "first")
    second = open_page(str(served[0].base_url).rstrip("/"))
    tokens(second, 5)
    second.click("#fresh")
    write(second, "other")
    for one in (tab, second):
        one.locator("#tree button.node").nth(1).wait_for()
    assert (text_of(tab), text_of(second)) == ("first", "other")
    tab.locator("#tree button[data-drop]").first.click()
    second.locator("#tree button.node").nth(1).wait_for(state="detached")
    for one in (tab, second):
        one.reload()
        one.locator("#tree button.node").wait_for()
        assert len(nodes(one)) == 1
    second.close()


def test_tabs_that_change_one_text_lose_nothing(tab, open_page, served) -> None:
    """Both versions are kept, and so is what is written into a text that another tab deletes."""
    write(tab, "one two")
    second = open_page(str(served[0].base_url).rstrip("/"))
    tokens(second, 7)
    held: list[Any] = []
    second.route("**/tokenize", lambda route: held.append(route))
    with second.expect_request("**/tokenize"):
        second.keyboard.insert_text(" right")
    tab.keyboard.insert_text(" left")
    settled(tab)
    held[0].continue_()
    second.unroute("**/tokenize")
    settled(second)
    assert (bytes(ids_of(tab)), bytes(ids_of(second))) == (b"one two left", b"one two right")
    second.evaluate("""() => {
      window.heard = [];
      new BroadcastChannel("transformer-xl").onmessage = ({ data }) => heard.push(...data.removed);
    }""")
    tab.locator("#tree > ul > li", has_text="left").locator("button[data-drop]").dispatch_event("click")
    second.wait_for_function("() => heard.length == 1")
    second.fill("#max_tokens", "60000")
    second.click("#go")
    tab.locator(
        "#tree button.node", has_text=re.compile(r"\d\d\d tokens")
    ).wait_for()  # as it is kept from time to time
    tab.locator("#tree button[data-drop]").dispatch_event("click")
    second.wait_for_function("() => heard.length == 3")
    tab.locator("#tree button.node").wait_for()  # again
    second.keyboard.press("Escape")
    second.locator("#go", has_text="Continue").wait_for()
    ids = ids_of(second)
    second.reload()
    tokens(second, len(ids))
    assert ids_of(second) == ids
    tab.locator("#tree button.node", has_text=f"({len(ids):,} tokens)").wait_for()
    second.close()


def test_full_store_is_said_and_what_is_shown_can_be_kept_later(tab) -> None:
    tab.evaluate("""() => {
      window.commit = IDBTransaction.prototype.commit;
      IDBTransaction.prototype.commit = IDBTransaction.prototype.abort; // as the browser does then
    }""")
    write(tab, PROMPT)
    tab.locator("#error", has_text="has no room").wait_for()
    write(tab, "more")
    assert text_of(tab) == f"{PROMPT}more"
    tab.evaluate("() => { IDBTransaction.prototype.commit = commit; }")
    tab.click("#retry")
    tab.reload()
    tokens(tab, NUM_BYTES + 4)
    assert text_of(tab) == f"{PROMPT}more"


def test_page_goes_on_after_a_restart_of_the_server(open_page, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose sessions are gone: the text is read again."""
    monkeypatch.setattr("transformer_xl.apps.serve.server._ANSWER_SECONDS", 0)
    with running({"tiny": run}, max_memory_length=11, shutdown_seconds=0) as (client, _):
        port = client.base_url.port
        tab = open_page(str(client.base_url).rstrip("/"))
        tab.locator("#model option").first.wait_for(state="attached")
        write(tab, LONG)
        tab.fill("#max_tokens", "60000")
        tab.focus("#text")
        tab.keyboard.press("Control+Enter")
        written(tab, 2 * NUM_BYTES + 20)
    tab.locator("#error:visible").wait_for()
    ids = ids_of(tab)
    assert len(ids) >= 2 * NUM_BYTES + 20
    tab.fill("#max_tokens", "12")
    tab.keyboard.press("Tab")
    tab.click("#sampling summary")
    tab.fill("#seed", "5")
    tab.focus("#text")
    tab.keyboard.press("Control+Enter")
    tab.locator("#error", has_text="does not answer").wait_for()
    with running({"tiny": run}, max_memory_length=11, port=port):
        tab.click("#retry")
        tokens(tab, len(ids) + 12)
        made = generate(run, ids, max_new_tokens=12, seed=5, **SETTINGS)
        assert ids_of(tab) == [*ids, *made.token_ids]
        assert tab.locator("#error").is_hidden()
        tab.close()


def test_link_of_many_parts_is_opened(open_page, served) -> None:
    parts = [["you", [97], None], ["model", [98], 1]] * 1500
    linked = {"model": "tiny", "text": "ab" * 1500, "parts": parts, "settings": {}}
    packed = zlib.compress(json.dumps(linked).encode(), wbits=-15)
    tab = open_page(str(served[0].base_url).rstrip("/"), f"#t={base64.urlsafe_b64encode(packed).decode().rstrip('=')}")
    tokens(tab, 3000)
    assert kept(tab)["kinds"] == "ym" * 1500
    tab.close()


def test_phone_width_dark_and_light(tab) -> None:
    """Everything fits, is named, and can be read; axe finds nothing serious."""
    contrast = """([paint]) => {
      const swatch = document.createElement("span");
      swatch.className = `swatch ${paint}`;
      document.getElementById("legend").append(swatch);
      const parse = (text) => text.match(/[\\d.]+/g).map(Number);
      const style = getComputedStyle(swatch), back = parse(getComputedStyle(document.body).backgroundColor);
      const [r, g, b, alpha = 1] = parse(style.backgroundColor);
      const mixed = [r, g, b].map((c, i) => c * alpha + back[i] * (1 - alpha));
      const luminance = (rgb) => [.2126, .7152, .0722].reduce((sum, weight, i) => {
        const c = rgb[i] / 255;
        return sum + weight * (c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
      }, 0);
      const both = [luminance(mixed), luminance(parse(style.color))].sort((x, y) => x - y);
      swatch.remove();
      return [(both[1] + .05) / (both[0] + .05), alpha];
    }"""
    write(tab, PROMPT + "W" * 200)
    tab.set_viewport_size({"width": 390, "height": 844})
    for scheme, back in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 20, 20)")):
        tab.emulate_media(color_scheme=scheme)
        for paint in ("high-12", "saves-12", "looks-12"):
            ratio, alpha = tab.evaluate(contrast, [paint])
            assert ratio >= 4.5, (scheme, paint)
            assert 0.6 < alpha < 0.7
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == back
        tab.touchscreen.tap(*spot(tab, 9))
        chosen(tab, "9:")
        tab.locator("#alternatives li").first.wait_for()
        box = tab.locator("#branch").bounding_box()  # in the window, wherever the text is
        assert 0 <= box["y"] <= 844 - box["height"]
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        for width in (390, 1280) if AXE.exists() else ():
            tab.set_viewport_size({"width": width, "height": 844})
            tab.evaluate(AXE.read_text())
            found = tab.evaluate(
                "axe.run().then((all) => all.violations.map(({ id, impact, nodes }) => [id, impact, nodes[0].html]))"
            )
            assert [one for one in found if one[1] in ("serious", "critical")] == [], (width, scheme)
        tab.set_viewport_size({"width": 390, "height": 844})
        tab.locator("#release").tap()
    named = "a => a.filter(e => !e.labels?.length && !e.textContent.trim() && !e.getAttribute('aria-label')).length"
    assert tab.locator("button, input, select, textarea").evaluate_all(named) == 0


def test_other_model_reads_the_same_text(open_page, run: Run, tmp_path: Path) -> None:
    """The other one has no memory, and so no choice of its length."""
    vaswani = make_run(tmp_path / "vaswani", "vaswani")
    with running({"tiny": run, "vaswani": vaswani}) as (client, _):  # no attention by distance either
        tab = open_page(str(client.base_url).rstrip("/"))
        tab.locator("#model option").first.wait_for(state="attached")
        write(tab, PROMPT)
        tab.select_option("#model", "vaswani")
        tab.locator("#memory-choice").wait_for(state="hidden")
        settled(tab)
        (expected,) = score(vaswani, PROMPT)
        np.testing.assert_allclose(kept(tab)["bits"]["0"], expected.nats_K / np.log(2), atol=1e-3)
        tab.keyboard.press("Alt+3")
        assert "no attention" in tab.locator("#finding").inner_text()
        # back in the text of the first model
        tab.locator("#tree button.node").first.click()
        tab.locator("#memory-choice").wait_for()
        assert tab.locator("#model").input_value() == "tiny"
        assert text_of(tab) == PROMPT
        tab.close()


def test_key_is_asked_for_first_and_not_kept(open_page, run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    with running({"tiny": run}, api_key_file=str(tmp_path / "keys")) as (client, _):
        tab = open_page(str(client.base_url).rstrip("/"))
        for message, key in (("is needed", "a-key-that-the-server-does-not-know"), ("is not known", KEY)):
            tab.locator("#error", has_text=message).wait_for()
            assert tab.locator("main").is_hidden()
            assert tab.evaluate("document.activeElement.id") == "key-value"
            tab.keyboard.type(key)
            tab.keyboard.press("Enter")
        tab.locator("#model option").wait_for(state="attached")
        write(tab, "abc")
        assert tab.locator("#key").is_hidden()
        assert tab.locator("#error").is_hidden()
        assert ids_of(tab) == list(b"abc")
        assert KEY not in tab.evaluate("JSON.stringify(localStorage)")
        tab.close()


def test_page_is_served_with_a_content_security_policy(served) -> None:
    client = served[0]
    names = ("page.css", "page.js", "editor.js", "examples.js", "panels.js", "reading.js", "server.js", "work.js")
    for path in ("/", *(f"/page/{name}" for name in names)):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:" in policy
        assert not re.search(
            r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://(?!www.w3.org/2000/svg)", answer.text
        )
    assert client.get("/page/../app.py").status_code == 404
