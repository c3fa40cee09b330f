"""The page holds the terms to within half a step, shows any text as text, and a browser shows its numbers."""

from __future__ import annotations

import base64
import json
import re
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from transformer_xl.analysis.attention_maps import TermMaps, read_attention
from transformer_xl.analysis.attention_page import (
    MAX_BYTES,
    TokenText,
    _token_text,
    attention_page,
    fitting_tokens,
    num_bytes,
    token_texts,
)
from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits
from transformer_xl.text.tokenizers import ByteTokenizer

TEXT = 'a <b>&amp;\n</script><script>window.broken=1</script>\t"it\'s" caf\u00e9 $x\x00'.encode()
HOSTILE = "</script><script>window.broken = 1</script><!--<script>"
HEBREW = "\u05e9\u05dc\u05d5\u05dd"
HEX = len(TEXT) - 5  # the place of the second byte of the accented letter


@pytest.fixture
def maps(make_model):
    """Of the hostile text, with a memory too short for all of it."""
    model = make_model(vocab_size=256, n_layers=2)
    ids = np.frombuffer(TEXT, dtype=np.uint8)
    maps, plan = TermMaps(model, len(TEXT)), EvaluationPlan(13, ContextLimits(29))
    read_attention(model, ids, plan, [maps.callback(plan)])
    return maps


@pytest.fixture
def page(maps):
    tokens = token_texts(ByteTokenizer(), np.frombuffer(TEXT, dtype=np.uint8))
    tokens[60] = TokenText(HOSTILE, HOSTILE, False)  # as a token of a word vocabulary may be
    tokens[44] = TokenText("W" * 60, "W" * 60, False)
    tokens[45] = TokenText(HEBREW, HEBREW, False)
    return attention_page(maps, tokens, "Heads of <run>", "What & how", apart=False)


def test_tokens_are_shown_as_text():
    shown = token_texts(ByteTokenizer(), np.frombuffer(TEXT, dtype=np.uint8))
    assert "".join(token.name for token in shown[:4]) == "a\u00b7<b"
    assert [token.shown for token in shown if token.name == "\u21b5"] == ["\u21b5\n"]
    assert (shown[HEX].shown, shown[HEX].name, shown[HEX].odd) == ("A9", "bytes A9", True)
    assert shown[-1].name == "\\x00"
    assert not any(token.odd for token in shown[: HEX - 1])


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"x" * 60, "x" * 60),
        (b"x" * 61, "x" * 57 + "..."),
        (b"x" * 56 + b"\x00" + b"x" * 9, "x" * 56 + "..."),  # no half of an escape
        (b"\xff" * 99, "bytes" + " FF" * 17 + " ..."),
    ],
)
def test_a_long_token_has_a_short_name(content, name):
    token = _token_text(content)
    assert (token.name, len(token.name) <= 60) == (name, True)
    assert len(token.shown) >= len(content)  # in the text it is whole


def test_the_page_is_whole_and_nothing_in_the_text_breaks_out(page):
    assert page.count("</script>") == 2  # the data's and the program's own
    assert "<!--" not in page
    assert "Heads of &lt;run&gt;" in page
    assert "What &amp; how" in page
    assert "http" not in page
    assert len(re.findall(r"<(?:link|img|iframe)\b|\bsrc=|@import|url\(", page)) == 0


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])


def numbers(text, dtype, *shape):
    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape)


def test_the_data_are_the_terms_to_within_half_a_step(maps, page):
    data = data_of(page)
    size = len(data["tokens"])
    assert (data["n_layers"], data["n_heads"], size) == (2, 2, len(TEXT))
    levels = numbers(data["levels"], "<u2", 2, 2, 2, size * (size + 1) // 2)
    ranges = numbers(data["ranges"], "<f8", 2, 2, 2, 2)
    for layer, head in np.ndindex(2, 2):
        for number, term in enumerate(("content", "position")):
            wanted, (low, step) = maps.map_QQ(term, layer, head), ranges[layer, head, number]
            pair = 0
            for query in range(size):
                for key in range(query + 1):
                    if key >= data["first_seen"][query]:
                        found = low + step * levels[layer, head, number, pair]
                        assert abs(found - wanted[query, key]) <= step * 0.5000001
                    else:
                        assert np.isnan(wanted[query, key])
                    pair += 1
    for name in ("content_bias", "position_bias", "log_total"):
        found = getattr(maps, f"{name}_LNQ")
        np.testing.assert_array_equal(numbers(data[name], "<f4", 2, 2, size), found.float().numpy())


def test_alike_terms_have_one_level(make_model):
    model = make_model(vocab_size=256, n_layers=1)
    with torch.no_grad():
        model.layers[0].attention.q_proj.weight.zero_()
    maps, plan = TermMaps(model, 5), EvaluationPlan(5, ContextLimits(0))
    read_attention(model, np.arange(5, dtype=np.uint8), plan, [maps.callback(plan)])
    page = attention_page(maps, token_texts(ByteTokenizer(), np.arange(5)), "a", "b", apart=True)
    data = data_of(page)
    assert data["apart"] is True
    assert not numbers(data["levels"], "<u2", 1, 2, 2, 15).any()
    assert not numbers(data["ranges"], "<f8", 1, 2, 2, 2).any()  # all are 0, and so is the step


def test_how_many_tokens_fit():
    shape = (16, 10)
    most = fitting_tokens(shape, 10**6, None)
    assert num_bytes(shape, most) <= MAX_BYTES < num_bytes(shape, most + 1)
    assert fitting_tokens((4, 2), 10**6, None) == 192
    assert fitting_tokens((4, 2), 31, None) == 31
    assert fitting_tokens((4, 2), 10**6, 700) == 700
    with pytest.raises(UserError, match=f"page_tokens 300: .* 16 x 10 heads would take 28 MiB .* give {most} at most"):
        fitting_tokens(shape, 10**6, 300)
    with pytest.raises(UserError, match="page_tokens 300: the text has 299 tokens"):
        fitting_tokens((4, 2), 299, 300)


QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TIP = r"query (\d+): (?P<query>.*)\nkey \d+: (?P<key>.*), (?P<back>\d+) back\n(?P<numbers>.*)"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None or find_spec("playwright") is None:
        pytest.skip("needs Chromium and playwright: apt-get install chromium, pip install -e '.[dev]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def tab(browser, page, tmp_path):
    """The page in a browser; nothing goes wrong in it, and it asks for nothing."""
    file = tmp_path / "attention.html"
    file.write_text(page, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1000, "height": 700})
    faults, asked = [], []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("console", lambda message: faults.append(message.text))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    assert (faults, asked) == ([], [file.as_uri()])
    tab.close()


def tip(tab) -> dict[str, str]:
    """What the tooltip says, and its numbers by the names of terms."""
    assert tab.locator("#tip").is_visible()
    box = tab.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["y"] >= 0
    assert box["x"] + box["width"] <= 1000
    assert box["y"] + box["height"] <= 700
    found = re.fullmatch(TIP, tab.locator("#tip").inner_text(), flags=re.DOTALL)
    numbers = dict(line.rsplit(": ", 1) for line in found["numbers"].splitlines())
    return {**found.groupdict(), **numbers}


def check(tab, maps, query, key, layer, head):
    said = tip(tab)
    assert said["back"] == str(query - key)
    for term, words in maps.terms.items():
        wanted = maps.map_QQ(term, layer, head)[query, key]
        steps = 1e-3 * abs(wanted) if term == "probability" else 1e-3
        assert float(said[words]) == pytest.approx(wanted, abs=steps + 1e-6), (term, layer, head)


def test_a_browser_shows_the_text_and_its_numbers(tab, maps):
    tokens = tab.locator("#text span")
    assert tokens.count() == len(TEXT)
    assert tab.locator("#text").inner_text().replace("\u21b5\n", "\n")[:30] == TEXT[:30].decode()
    assert tab.evaluate("window.broken") is None
    assert tokens.nth(60).inner_text() == HOSTILE
    # pointing at a token makes it the query
    tokens.nth(17).hover()
    check(tab, maps, 17, 17, 0, 0)
    assert tab.locator("#text span.query").get_attribute("data-index") == "17"
    # held, others are read as keys, whatever layer and head are chosen
    tokens.nth(41).click()
    for layer, head in ((0, 0), (1, 0), (1, 1)):
        tab.select_option("#layer", str(layer))
        tab.select_option("#head", str(head))
        tokens.nth(20).hover()
        check(tab, maps, 41, 20, layer, head)
    tokens.nth(50).hover()
    assert "comes later" in tab.locator("#tip").inner_text()
    tokens.nth(0).hover()
    assert "not visible" in tab.locator("#tip").inner_text()


def test_colours_and_table_are_of_the_chosen_term(tab, maps):
    def background(place):
        return tab.locator(f"[data-index='{place}']").evaluate("e => e.style.background")

    tab.locator("#text span").nth(41).click()
    tab.select_option("#layer", "1")
    for term in maps.terms:
        tab.select_option("#term", term)
        found = maps.map_QQ(term, 1, 0)[41]
        rows = tab.locator("#strongest tbody tr")
        assert rows.count() == 10
        assert int(rows.nth(0).locator("td").nth(1).inner_text()) == 41 - int(np.nanargmax(found))
        assert float(rows.nth(0).locator("td").nth(2).inner_text()) == pytest.approx(np.nanmax(found), abs=1e-3)
        assert background(int(np.nanargmax(found))) == "rgb(253, 231, 37)"  # the brightest of viridis
        assert background(int(np.nanargmin(found))) != background(int(np.nanargmax(found)))
        assert tab.locator("#highest").inner_text()[:5] == f"{np.nanmax(found):.4f}"[:5]
    # what is not seen is grey: later tokens, and those that left the memory
    grey = tab.locator("#text span.unseen").evaluate_all("a => a.map(e => Number(e.dataset.index))")
    assert set(grey) == {place for place in range(len(TEXT)) if not maps.seen_QQ[41, place]} > {0, 42}


def test_keys_and_the_map_choose_too(tab, maps):
    tokens = tab.locator("#text span")
    tokens.nth(41).focus()
    tab.keyboard.press("ArrowLeft")
    check(tab, maps, 40, 40, 0, 0)
    tab.keyboard.press("Enter")
    tab.keyboard.press("ArrowLeft")
    check(tab, maps, 40, 39, 0, 0)
    tab.keyboard.press("Escape")
    tab.keyboard.press("End")
    last = len(TEXT) - 1
    check(tab, maps, last, last, 0, 0)
    tokens.nth(3).click()
    tab.click("#release")
    box = tab.locator("#map").bounding_box()
    tab.locator("#map").hover(position={"x": box["width"] * 30.5 / len(TEXT), "y": box["height"] * 45.5 / len(TEXT)})
    check(tab, maps, 45, 30, 0, 0)


def test_names_of_any_length_and_direction_leave_the_numbers_alone(tab):
    tab.locator("#text span").nth(45).hover()
    assert f"query 45: \u2068{HEBREW}\u2069\nkey 45: \u2068{HEBREW}\u2069, 0 back\n" in tab.locator("#tip").inner_text()
    assert tab.locator("#chosen").inner_text() == f"Token 45: \u2068{HEBREW}\u2069"
    names = tab.locator("#strongest tbody td:first-child")
    assert all(name[0] + name[-1] == "\u2068\u2069" for name in names.all_inner_texts())
    names.first.evaluate("(cell, name) => { cell.textContent = name; }", "W" * 60)
    assert names.first.bounding_box()["width"] <= 24 * 16 + 1
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
