"""A corpus whose documents are tokenized by many processes: each writes a folder of its own, and one joins them.

    shards/00000-of-00004   the corpus of the documents that rank 0 of 4 read; it may lack splits, or be empty
    shards/00001-of-00004   and so on

`transformer_xl.integrations.datatrove` writes these folders, each as `write_corpus` does, with its name as the name of
the corpus and one source for all.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import as_path, as_user_error, check_is_new
from transformer_xl.text.corpus_writer import split_writers
from transformer_xl.text.sources.archives import Progress, no_progress
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers.base import token_dtype
from transformer_xl.text.tokenizers.storage import describe_difference

_NAME = re.compile(r"(\d{5,})-of-(\d{5,})")


def new_rank(folder: Path, rank: int, num_ranks: int) -> Path:
    """Return the folder that a rank is to write, and delete what it wrote in an earlier attempt.

    Args:
        folder: the folder of all ranks.
        rank: which rank, 0 to `num_ranks` - 1.
        num_ranks: number of ranks.

    Raises:
        UserError: there is something else than a corpus, or it cannot be deleted.
    """
    path = folder / f"{rank:05d}-of-{num_ranks:05d}"
    if path.exists():
        Corpus.open(path)
        with as_user_error(f"replacing {path}"):
            shutil.rmtree(path)
    return path


def join_ranks(
    folder: str | Path, out: str | Path, *, max_shard_tokens: int = 2**30, progress: Progress = no_progress
) -> Corpus:
    """Join what all ranks wrote to one corpus, in the order of the ranks.

        join_ranks("shards", "corpora/mine")

    Token and document files, counts and checksums are those of `prepare` with the same documents in the same order. The
    folder of the ranks is not changed.

    Args:
        folder: the folder of all ranks, which datatrove's tasks wrote.
        out: the folder of the corpus; it must not exist.
        max_shard_tokens: maximum number of tokens in one token file of a split.
        progress: called as progress("join", bytes written, bytes in all).

    Raises:
        UserError: a rank is missing, is there twice, is damaged, or was made with another tokenizer or other settings
            than the first; no rank has text to train on; or `out` exists or cannot be written.
    """
    folder, out = as_path(folder, "folder"), as_path(out, "out")
    check_is_new(out)
    ranks = _open_ranks(folder)
    first, done = ranks[0], 0
    for rank in ranks:
        if rank.record.tokenizer_sha256 != first.record.tokenizer_sha256:
            difference = describe_difference(rank.tokenizer, first.tokenizer) or "another file with the same tokens"
            problem = f"{rank.path} was made with another tokenizer than {first.path} ({difference})"
            raise UserError(f"{problem}; run its task again with that of the others")
        if rank.source != first.source:
            problem = f"{rank.path} is of {rank.source!r}, {first.path} of {first.source!r}"
            raise UserError(f"{problem}; run its task again with the settings of the others")
    if not any("train" in rank.splits for rank in ranks):
        raise UserError(f"no rank in {folder} has text to train on; look whether the pipeline dropped all documents")
    num_tokens = sum(record.num_tokens for rank in ranks for record in rank.record.splits.values())
    total = num_tokens * token_dtype(first.tokenizer.vocab_size).itemsize
    with split_writers(out, first.tokenizer, out.name, first.source, max_shard_tokens) as writers:
        for rank in ranks:
            for split in rank.splits:
                for written in writers[split].copy(rank.split(split, verify=True)):
                    done += written
                    progress("join", done, total)
    return Corpus.open(out)


def _open_ranks(folder: Path) -> list[Corpus]:
    """Open the corpora of all ranks, in their order.

    Raises:
        UserError: a rank is missing or is there twice, or there are ranks of several numbers of ranks.
    """
    with as_user_error(f"reading {folder}"):
        paths = sorted(path.parent for path in folder.glob("[!.]*/corpus.json"))
    found: dict[int, Corpus] = {}
    counts = set[int]()
    for corpus in map(Corpus.open, paths):
        if not (match := _NAME.fullmatch(corpus.name)):
            advice = "give the folder that datatrove's tasks wrote to"
            raise UserError(f"{corpus.path} is a corpus, but not of a rank; {advice}")
        rank, count = map(int, match.groups())
        counts.add(count)
        if len(counts) > 1:
            several = " and ".join(f"of {one:,} tasks" for one in sorted(counts))
            raise UserError(f"{folder} has ranks {several}; delete those of the other run")
        if rank in found:
            raise UserError(
                f"rank {rank:,} is there twice, in {found[rank].path} and {corpus.path}; delete one of them"
            )
        found[rank] = corpus
    if not found:
        raise UserError(f"no ranks in {folder}; give the folder that datatrove's tasks wrote to (CorpusTokenizer)")
    if missing := [rank for rank in range(*counts) if rank not in found]:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        problem = f"{len(missing):,} of {len(missing) + len(found):,} ranks are missing in {folder}: {shown}"
        raise UserError(f"{problem}; run the pipeline again, which runs the tasks that are not complete")
    return [found[rank] for rank in sorted(found)]
