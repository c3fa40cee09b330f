"""The attention page stores the terms to within half a quantization step, and a browser displays text and values.

Shape suffixes: N heads, L layers, Q tokens as queries and as keys.
"""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest

from transformer_xl.apps.analyze.attention_maps import TermMaps, trace_attention
from transformer_xl.apps.analyze.attention_page import (
    MAX_BYTES,
    TokenText,
    _token_text,
    attention_page,
    choose_page_tokens,
    token_texts,
)
from transformer_xl.config import UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits
from transformer_xl.text.tokenizers import ByteTokenizer

# markup that could end the script of the page, quotes, a $ that starts a formula in matplotlib, a character of two
# bytes, and a control character
TEXT = 'a <b>&amp;\n</script><script>window.broken=1</script>\t"it\'s" caf\u00e9 $x\x00'.encode()
# a token that would run a script if it were not escaped
HOSTILE = "</script><script>window.broken = 1</script><!--<script>"
HEBREW = "\u05e9\u05dc\u05d5\u05dd"  # a word that is written from right to left


def maps_of(model, ids, segment_length, memory_length):
    plan = EvaluationPlan(segment_length, ContextLimits(memory_length))
    maps = TermMaps(model, plan, len(ids))
    trace_attention(model, ids, plan, [maps.add])
    return maps


@pytest.fixture
def maps(make_model):
    """Maps of TEXT, with segment length 13 and memory length 29, which is shorter than the text."""
    return maps_of(make_model(vocab_size=256, n_layers=2), np.frombuffer(TEXT, dtype=np.uint8), 13, 29)


@pytest.fixture
def page(maps):
    """A page of TEXT; three tokens are replaced by long or hostile words, as a word vocabulary may have them."""
    tokens = token_texts(ByteTokenizer(), np.frombuffer(TEXT, dtype=np.uint8))
    for index, word in ((60, HOSTILE), (44, "W" * 60), (45, HEBREW)):
        tokens[index] = TokenText(word, word, odd=False)
    return attention_page(maps, tokens, "Heads of <run>", "What & how", spaced=False)


def test_tokens_are_displayed_as_text():
    tokens = token_texts(ByteTokenizer(), np.frombuffer(TEXT, dtype=np.uint8))
    assert "".join(token.name for token in tokens[:4]) == "a\u00b7<b"
    assert [token.shown for token in tokens if token.name == "\u21b5"] == ["\u21b5\n"]
    half = len(TEXT) - 5  # position of the second byte of the accented letter, which is no character by itself
    assert tokens[half] == TokenText("A9", "bytes A9", odd=True)
    assert tokens[-1].name == "\\x00"
    assert not any(token.odd for token in tokens[: half - 1])


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"x" * 60, "x" * 60),
        (b"x" * 61, "x" * 57 + "..."),
        (b"x" * 56 + b"\x00" + b"x" * 9, "x" * 56 + "..."),  # an escape is not split
        (b"\xff" * 99, "bytes" + " FF" * 17 + " ..."),
    ],
)
def test_name_of_long_token_is_truncated(content, name):
    """To at most 60 characters, with ... at the end."""
    token = _token_text(content)
    assert token.name == name
    assert len(token.shown) >= len(content)  # the text has the whole token


def test_text_cannot_break_out_of_the_page(page):
    assert page.count("</script>") == 2  # the ends of the data element and of the script element
    assert "<!--" not in page
    assert "Heads of &lt;run&gt;" in page
    assert "What &amp; how" in page
    assert not re.search(r"http|<(?:link|img|iframe)\b|\bsrc=|@import|url\(", page)  # the page loads nothing


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])


def decode(text, dtype, *shape):
    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape)


def test_stored_terms_are_exact_to_half_a_step(maps, page):
    data = data_of(page)
    size = len(data["tokens"])
    assert (data["n_layers"], data["n_heads"], size) == (2, 2, len(TEXT))
    # shapes: layers, heads, the terms content and position; pairs of a query and a key at or before it
    levels = decode(data["levels"], "<u2", 2, 2, 2, size * (size + 1) // 2)
    ranges = decode(data["ranges"], "<f8", 2, 2, 2, 2)  # the last dimension: minimum and step
    query, key = np.tril_indices(size)
    is_seen = key >= np.array(data["first_seen"])[query]
    for layer, head in np.ndindex(2, 2):
        for index, term in enumerate(("content", "position")):
            minimum, step = ranges[layer, head, index]
            expected = maps.map_QQ(term, layer, head)[query, key]
            np.testing.assert_array_equal(np.isfinite(expected), is_seen)
            values = minimum + step * levels[layer, head, index]
            np.testing.assert_allclose(values[is_seen], expected[is_seen], rtol=0, atol=step * 0.5000001)
    for name in ("content_bias", "position_bias", "log_denominator"):
        expected = getattr(maps, f"{name}_LNQ").float().numpy()
        np.testing.assert_array_equal(decode(data[name], "<f4", 2, 2, size), expected)


def test_page_tokens_are_limited_by_size_and_text():
    shape = (16, 10)
    max_tokens = choose_page_tokens(shape, 10**6, None)
    # 640 bytes for each pair of a query and a key at or before it: two terms of 2 bytes for each of 160 heads
    assert 640 * max_tokens * (max_tokens + 1) // 2 <= MAX_BYTES < 640 * (max_tokens + 1) * (max_tokens + 2) // 2
    assert choose_page_tokens((4, 2), 10**6, None) == 192  # the default, which fits with so few heads
    assert choose_page_tokens((4, 2), 31, None) == 31
    assert choose_page_tokens((4, 2), 10**6, 700) == 700
    with pytest.raises(UserError, match=f"page_tokens 300: .* room for {max_tokens} with 16 x 10 heads"):
        choose_page_tokens(shape, 10**6, 300)
    with pytest.raises(UserError, match="page_tokens 300: the text has 299 tokens"):
        choose_page_tokens((4, 2), 299, 300)


TOOLTIP = r"query \d+: .*\nkey \d+: .*, (?P<distance>\d+) back\n(?P<terms>.*)"


@pytest.fixture
def tab(browser, page, tmp_path):
    """The page in a browser; afterwards, check that it had no error and requested nothing."""
    file = tmp_path / "attention.html"
    file.write_text(page, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1000, "height": 700})
    errors, requests = [], []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    assert (errors, requests) == ([], [file.as_uri()])
    tab.close()


def check_tooltip(tab, maps, query, key, layer=0, head=0):
    """The tooltip is inside the window, and shows the terms of this query and key."""
    tooltip = tab.locator("#tip")
    box = tooltip.bounding_box()
    assert 0 <= box["x"] <= 1000 - box["width"]
    assert 0 <= box["y"] <= 700 - box["height"]
    shown = re.fullmatch(TOOLTIP, tooltip.inner_text(), flags=re.DOTALL)
    assert shown["distance"] == str(query - key)
    values = dict(line.rsplit(": ", 1) for line in shown["terms"].splitlines())
    for term, title in maps.terms.items():
        expected = maps.map_QQ(term, layer, head)[query, key]
        tolerance = 1e-3 * abs(expected) if term == "probability" else 1e-3
        assert float(values[title]) == pytest.approx(expected, abs=tolerance + 1e-6), (term, layer, head)


def test_first_view_has_a_query_and_shows_where_tokens_begin(tab, maps):
    """Before anything is selected, the query is the first token with as many keys as any."""
    query = int(maps.seen_QQ.sum(1).argmax())
    assert tab.locator("#text span.query").get_attribute("data-index") == str(query)
    assert tab.locator("#chosen").inner_text().startswith(f"Token {query}: ")
    assert tab.locator("#strongest tbody tr").count() == 10
    assert tab.locator("#tip").is_hidden()
    style = "(e, [part, name]) => getComputedStyle(e, part)[name]"
    unseen, space = tab.locator("#text span.unseen").last, tab.locator("#text span").nth(1)
    assert unseen.evaluate(style, [None, "backgroundColor"]) != "rgba(0, 0, 0, 0)"  # each token is a box
    assert "inset" in unseen.evaluate(style, [None, "boxShadow"])  # with a gap to the next
    assert (space.inner_text(), space.evaluate(style, ["::before", "content"])) == (" ", '"\u00b7"')
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_browser_displays_text_and_values(tab, maps):
    tokens = tab.locator("#text span")
    assert tokens.count() == len(TEXT)
    assert tab.locator("#text").inner_text().replace("\u21b5\n", "\n")[:30] == TEXT[:30].decode()
    assert tab.evaluate("window.broken") is None
    assert tokens.nth(60).inner_text() == HOSTILE
    # hovering over a token makes it the query
    tokens.nth(17).hover()
    check_tooltip(tab, maps, 17, 17)
    assert tab.locator("#text span.query").get_attribute("data-index") == "17"
    # after a click, other tokens are keys, in every layer and head
    tokens.nth(41).click()
    for layer, head in ((0, 0), (1, 0), (1, 1)):
        tab.select_option("#layer", str(layer))
        tab.select_option("#head", str(head))
        tokens.nth(20).hover()
        check_tooltip(tab, maps, 41, 20, layer, head)
    tokens.nth(50).hover()
    assert "comes later" in tab.locator("#tip").inner_text()
    tokens.nth(0).hover()
    assert "not visible" in tab.locator("#tip").inner_text()


def test_colours_and_table_are_of_the_selected_term(tab, maps):
    def background(index):
        return tab.locator(f"[data-index='{index}']").evaluate("e => e.style.background")

    tab.locator("#text span").nth(41).click()
    tab.select_option("#layer", "1")
    for term in maps.terms:
        tab.select_option("#term", term)
        values = maps.map_QQ(term, 1, 0)[41]
        highest, lowest = int(np.nanargmax(values)), int(np.nanargmin(values))
        assert tab.locator("#strongest tbody tr").count() == 10
        cells = tab.locator("#strongest tbody tr").first.locator("td").all_inner_texts()
        assert int(cells[1]) == 41 - highest
        assert float(cells[2]) == pytest.approx(values[highest], abs=1e-3)
        assert background(highest) == "rgb(253, 231, 37)"  # the last colour of matplotlib's viridis
        assert background(lowest) != background(highest)
        assert tab.locator("#highest").inner_text()[:5] == f"{values[highest]:.4f}"[:5]
    # tokens that are not seen are grey: those after the query, and those that have left the memory
    grey = tab.locator("#text span.unseen").evaluate_all("a => a.map(e => Number(e.dataset.index))")
    assert set(grey) == {index for index in range(len(TEXT)) if not maps.seen_QQ[41, index]} > {0, 42}


def test_keyboard_and_map_select_tokens(tab, maps):
    tokens = tab.locator("#text span")
    tokens.nth(41).focus()
    tab.keyboard.press("ArrowLeft")
    check_tooltip(tab, maps, 40, 40)
    tab.keyboard.press("Enter")
    tab.keyboard.press("ArrowLeft")
    check_tooltip(tab, maps, 40, 39)
    tab.keyboard.press("Escape")
    tab.keyboard.press("End")
    last = len(TEXT) - 1
    check_tooltip(tab, maps, last, last)
    tokens.nth(3).click()
    tab.click("#release")  # the button that unfixes the query that a click has fixed
    box = tab.locator("#map").bounding_box()
    tab.locator("#map").hover(position={"x": box["width"] * 30.5 / len(TEXT), "y": box["height"] * 45.5 / len(TEXT)})
    check_tooltip(tab, maps, 45, 30)
