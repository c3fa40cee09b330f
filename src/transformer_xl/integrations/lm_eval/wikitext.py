"""A task of lm_eval from a local file of WikiText: its task `wikitext`, without a download.

    python -m transformer_xl.integrations.lm_eval.wikitext wiki.test.raw --out tasks
    python -m transformer_xl.integrations.lm_eval --model txl --model_args run=RUN --tasks wikitext_local \
      --include_path tasks

As in lm_eval's task, each page is a document, the model reads it detokenized, and losses are divided by the words and
bytes of the page as the file has it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import zlib
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_folder

# " = Robert Boulter = " between empty lines begins a page. Sections within it have two signs or more; a formula may
# be a line that looks like a title.
_TITLE = re.compile(r"(?:\A|^ ?\n)( = [^=\n](?:.*[^=\n])? = \n)(?= ?\n)", flags=re.MULTILINE)

_TASK = """\
task: wikitext_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: !function lm_eval.tasks.wikitext.preprocess_wikitext.wikitext_detokenizer
process_results: !function lm_eval.tasks.wikitext.preprocess_wikitext.process_results
metadata:
  version: 2.0
"""


def write_task(source: Path, folder: Path) -> int:
    """Write the folder of a task `wikitext_local` and return its number of pages.

    Args:
        source: a file of WikiText, such as wiki.test.raw or wiki.test.tokens, or one compressed with gzip.
        folder: the new folder, for lm_eval's `--include_path`; it holds the path of its data, so it cannot be moved.

    Raises:
        UserError: the file cannot be read or has no page, or the folder exists already.
    """
    with as_user_error(f"reading {source}"):
        content = source.read_bytes()
        try:
            text = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode("utf-8")
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{source}: {error}; give a file of WikiText, such as wiki.test.raw") from None
    starts = [match.start(1) for match in _TITLE.finditer(text)]
    if not starts:
        raise UserError(f"{source}: no page begins with a title like ' = Title = '; give a file of WikiText")
    pages = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    data = json.dumps(str((folder / "test.jsonl").resolve()))  # a string of JSON is one of YAML too
    with atomic_folder(folder) as temporary:
        lines = "".join(json.dumps({"page": page}) + "\n" for page in pages)
        (temporary / "test.jsonl").write_text(lines, encoding="utf-8")
        (temporary / "wikitext_local.yaml").write_text(_TASK.format(data=data), encoding="utf-8")
    return len(pages)


def main() -> int:
    """Write a task for the command line; return 2 after an error that the user can correct."""
    parser = argparse.ArgumentParser(description="Make a task of lm_eval from a local file of WikiText.")
    parser.add_argument("source", type=Path, help="such as wiki.test.raw, also compressed with gzip")
    parser.add_argument("--out", type=Path, required=True, help="the new folder, for --include_path of lm_eval")
    arguments = parser.parse_args()
    try:
        pages = write_task(arguments.source, arguments.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: the task wikitext_local, {pages:,} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
