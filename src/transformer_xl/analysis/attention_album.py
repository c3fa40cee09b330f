"""What `txl analyze attention` leaves: pictures, the page, and the figures behind them.

Letters: L layers, N heads, P distances.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.analysis import attention_pictures as pictures
from transformer_xl.analysis.attention_maps import TermMaps, number_of
from transformer_xl.analysis.attention_page import TokenText, attention_page
from transformer_xl.analysis.loss_by_distance import LossByDistance

_WORDED = {"reset": "memory empty at the start", "continue": "memory goes on"}


@dataclass(frozen=True)
class Album:
    """A folder to be filled."""

    folder: Path
    figures: dict[str, Any]
    """What was read and found, by name; `drawn_heads` says which heads are drawn by themselves."""
    apart: bool
    """Whether there is space between tokens (words), or none (bytes, characters, pieces)."""

    def fill(
        self,
        mean_LNP: npt.NDArray[np.float64],
        maps: TermMaps,
        tokens: Sequence[TokenText],
        losses: Mapping[str, LossByDistance],
    ) -> dict[str, list[str]]:
        """Draws and writes; gives the names of the files by what they show."""
        heads = [(layer, head) for layer, head in self.figures["drawn_heads"]]
        stretch = self.figures["stretch"]
        subject = "a document" if stretch is None else f"a stretch of {number_of(stretch)}"
        fall = pictures.draw_losses({_WORDED[name]: loss for name, loss in losses.items()}, subject)
        names = [token.name for token in tokens]
        files = {
            "mean_attention": pictures.save(pictures.draw_means(mean_LNP), self.folder / "mean-attention"),
            "heads": pictures.save(pictures.draw_heads(mean_LNP, heads), self.folder / "heads"),
            "terms": [file for head in heads for file in self._terms(maps, head, names)],
            "loss": pictures.save(fall, self.folder / "loss"),
            "page": ["attention.html"],
            "figures": ["figures.json", "mean-attention.npy"],
        }
        title = f"What the heads of {Path(self.figures['run']).resolve().name} attend to"
        page = attention_page(maps, tokens, title, self._about(), apart=self.apart)
        (self.folder / "attention.html").write_text(page, encoding="utf-8", errors="replace")
        text = json.dumps({**self.figures, "files": files}, indent=1)
        (self.folder / "figures.json").write_text(text + "\n", encoding="utf-8")
        save_numbers(self.folder / "mean-attention.npy", mean_LNP)
        return files

    def _terms(self, maps: TermMaps, head: pictures.Head, names: Sequence[str]) -> list[str]:
        stem = self.folder / f"terms-layer-{head[0]}-head-{head[1]}"
        return pictures.save(pictures.draw_terms(maps, head, names), stem)

    def _about(self) -> str:
        figures = self.figures
        window = "" if figures["attention_window"] is None else f", a window of {figures['attention_window']:,}"
        return (
            f"The first {number_of(figures['page_tokens'])} of a text, read from an empty memory on, "
            f"{figures['segment_length']:,} at a time beside {figures['memory_length']:,} slots of memory{window}. Layers and heads "
            "are numbered from 0."
        )


def save_numbers(path: Path, numbers: npt.NDArray[np.floating]) -> None:
    """Writes numbers in float32 as an .npy file.

    Raises:
        OSError: the file cannot be written whole.
    """
    whole = io.BytesIO()
    np.save(whole, numbers.astype(np.float32), allow_pickle=False)
    path.write_bytes(whole.getvalue())  # np.save to a path says nothing of what is lost when the file is closed
