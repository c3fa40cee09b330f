"""`txl join`: make one corpus of what the tasks of a datatrove pipeline wrote."""

from __future__ import annotations

import time
from pathlib import Path

from transformer_xl.cli.options import Json
from transformer_xl.cli.prepare import print_corpus
from transformer_xl.progress import StageBars


def join(ranks: Path, /, *, out: Path, json: Json = False) -> None:
    """Join the folders that the tasks of a datatrove pipeline wrote to one corpus, in the order of the ranks.

    Args:
        ranks: Folder of the ranks, that of CorpusTokenizer.
        out: Folder to create; it must not exist.
        json: Print one JSON object and nothing else on standard output.
    """
    from transformer_xl.text.ranks import join_ranks

    start = time.perf_counter()
    with StageBars() as bars:
        corpus = join_ranks(ranks, out, progress=bars)
    print_corpus(corpus, time.perf_counter() - start, as_json=json)
