"""The plot of `txl score --per word`: its lines are the surprisals of the words, a panel for each item."""

from __future__ import annotations

from transformer_xl.apps.surprisal.plot import MAX_ITEMS, draw_surprisal
from transformer_xl.apps.surprisal.surprisal import SurprisalTable


def table_of(texts: list[str]) -> SurprisalTable:
    """Return a table of one item for each text, with numbers that tell words apart."""
    rows = [
        {
            "item": item, "word_number": number, "word": word, "tokens": 1, "num_unknown": 0,
            "surprisal_bits_alone": 10.0 * item + number, "surprisal_bits_memory_5": 10.0 * item + number - 1,
        }
        for item, text in enumerate(texts)
        for number, word in enumerate([*text.split(), ""], start=1)
    ]  # fmt: skip
    table = SurprisalTable(rows)
    table.label_columns = ("item",)
    return table


def test_lines_are_the_surprisals_of_words_without_the_end() -> None:
    """An item without words has no panel, and $ starts no formula."""
    figure = draw_surprisal(table_of(["a $b$ c", "", "d $"]))
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["0", "2"]
    for axes, item, words in zip(panels, (0, 2), (["a", "$b$", "c"], ["d", "$"]), strict=True):
        assert [label.get_text() for label in axes.get_xticklabels()] == words
        alone, memory = axes.get_lines()
        assert alone.get_ydata().tolist() == [10 * item + number for number in range(1, len(words) + 1)]
        assert memory.get_ydata().tolist() == [10 * item + number for number in range(len(words))]
        for look in ("get_color", "get_linestyle", "get_marker"):  # not only colours tell lines apart
            assert getattr(alone, look)() != getattr(memory, look)()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["alone", "with text before, memory 5"]
    figure.canvas.draw()


def test_only_the_first_items_are_drawn() -> None:
    assert len(draw_surprisal(table_of(["a"] * (MAX_ITEMS + 2))).axes) == MAX_ITEMS
