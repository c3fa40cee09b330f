"""A program that tokenizes JSON lines in four datatrove tasks, two at a time; a test kills it and starts it again.

python trove_pipeline.py FOLDER: reads FOLDER/text, writes FOLDER/ranks and FOLDER/logs. While FOLDER/hold exists, the
task of rank 2 stops after three documents, and waits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader

from transformer_xl.integrations.datatrove import CorpusTokenizer

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def hold(data: Iterable[Any], rank: int, _world_size: int) -> Iterator[Any]:
    """Pass the documents on, and hold rank 2."""
    for index, document in enumerate(data):
        while index == 3 and rank == 2 and (FOLDER / "hold").exists():
            (FOLDER / "held").touch()
            time.sleep(0.05)
        yield document


def executor(executor_class: type = LocalPipelineExecutor, **options: Any) -> Any:
    """Return the pipeline of four tasks."""
    tokenizer = CorpusTokenizer(FOLDER / "ranks", FOLDER / "tokenizer", split_key="split")
    pipeline = [JsonlReader(str(FOLDER / "text")), hold, tokenizer]
    return executor_class(pipeline, tasks=4, workers=2, logging_dir=str(FOLDER / "logs"), **options)


if __name__ == "__main__":
    executor().run()
