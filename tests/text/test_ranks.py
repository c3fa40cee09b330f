"""A corpus of many ranks: joined, it is what one process writes; ranks that do not belong together are refused."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tokenizers import byte_level
from refusals import txl

from transformer_xl.config import UserError
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import SPLITS, Document, DocumentUnit, SplitName
from transformer_xl.text.prepare import prepare
from transformer_xl.text.ranks import join_ranks, new_rank
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig, TokenizerKind
from transformer_xl.text.tokenizers.training import train_tokenizer

BYTES = ByteTokenizer()
TRAINED = ["a b\nab a b\n\nab ab\n", "b a"]
DOCUMENTS = st.lists(st.tuples(st.sampled_from(SPLITS), st.text("ab \n", max_size=11)), max_size=9)


def write_rank(folder: Path, documents: list[tuple[SplitName, Document]], rank: int, of: int, **options: Any) -> None:
    path = new_rank(folder, rank, of)
    write_corpus(path, documents, name=path.name, **{"source": "a test", "tokenizer": BYTES, **options})


def write_ranks(
    folder: Path,
    ranks: list[list[tuple[SplitName, str]]],
    tokenizer: Tokenizer = BYTES,
    document_unit: DocumentUnit = "file",
) -> Path:
    """Write the documents of each rank."""
    for rank, texts in enumerate(ranks):
        documents = [(split, Document(f"text {index}", [text.encode()])) for index, (split, text) in enumerate(texts)]
        write_rank(folder, documents, rank, len(ranks), tokenizer=tokenizer, document_unit=document_unit)
    return folder


def contents(corpus: Corpus) -> dict[str, object]:
    """Return all files of a corpus by their names, corpus.json without its name and source."""
    files = {path.name: path.read_bytes() for path in corpus.path.iterdir() if path.name != "corpus.json"}
    return {**files, "splits": corpus.record.splits}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    documents = [Document("text", [text.encode()]) for text in TRAINED]
    kinds: tuple[TokenizerKind, ...] = ("byte", "char", "word")
    made = {kind: train_tokenizer(TokenizerConfig(kind=kind), documents) for kind in kinds}
    return made | {"bpe": BPETokenizer.of_library(byte_level())}  # a token ends each document


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
@settings(deadline=None, max_examples=9)
@given(data=st.data())
def test_joined_ranks_are_what_one_process_writes(
    kind: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """Also ranks without documents, splits that only some ranks have, and documents without tokens."""
    unit: DocumentUnit = data.draw(st.sampled_from(["file", "line"]))
    ranks = data.draw(st.lists(DOCUMENTS, min_size=1, max_size=4))
    ranks[data.draw(st.integers(0, len(ranks) - 1))].append(("train", "ab\na"))
    texts = {split: [text for rank in ranks for name, text in rank if name == split] for split in SPLITS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = {
            split: [Document("text", [text.encode()]) for text in of_split]
            for split, of_split in texts.items()
            if any(of_split)
        }
        options = {"tokenizer": tokenizers[kind], "document_unit": unit}
        whole = write_corpus(folder / "whole", documents, name="whole", source="a test", **options)
        joined = join_ranks(write_ranks(folder / "ranks", ranks, *options.values()), folder / "joined")
        assert contents(joined) == contents(whole)
        joined.verify()
        # token files of any length: what the ranks wrote is cut anew
        size = data.draw(st.integers(1, 7))
        joined = join_ranks(folder / "ranks", folder / "small", max_shard_tokens=size)
        whole = write_corpus(
            folder / "whole small", documents, name="whole", source="a test", **options, max_shard_tokens=size
        )
        assert contents(joined) == contents(whole)


def test_the_command_gives_the_files_of_prepare(tmp_path: Path) -> None:
    texts = [[("train", "one\n"), ("valid", "two")], [], [("train", "three"), ("test", "four"), ("train", "five")]]
    write_ranks(tmp_path / "ranks", texts)
    result = txl("join", tmp_path / "ranks", "--out", tmp_path / "joined")
    assert result.status == 0, result.err
    assert f"next: txl train tiny --corpus {tmp_path / 'joined'}" in result.out
    documents = {"train": ["one\n", "three", "five"], "valid": ["two"], "test": ["four"]}
    whole = prepare(out=tmp_path / "whole", documents=documents)
    assert contents(Corpus.open(tmp_path / "joined")) == contents(whole)


def test_a_rank_that_is_written_again_replaces_what_it_wrote(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", [[("train", "old"), ("valid", "old")]])
    write_ranks(tmp_path / "ranks", [[("train", "new")]])
    joined = join_ranks(tmp_path / "ranks", tmp_path / "joined")
    assert (joined.splits, joined.split("train").tokens[:].tobytes()) == (("train",), b"new")
    # and nothing else is deleted
    (tmp_path / "ranks" / "00000-of-00001" / "corpus.json").unlink()
    with pytest.raises(UserError, match="no corpus at"):
        write_ranks(tmp_path / "ranks", [[("train", "new")]])
    assert (tmp_path / "ranks" / "00000-of-00001" / "train-00000.tokens").read_bytes() == b"new"


def test_ranks_that_do_not_belong_together_are_refused(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    ranks = write_ranks(tmp_path / "ranks", [[("train", "ab")], [("train", "a b")], [("valid", "b")]])
    out = tmp_path / "joined"
    second = ranks / "00001-of-00003"

    def refusal() -> str:
        result = txl("join", ranks, "--out", out)
        assert (result.status, out.exists(), result.err.count("\n")) == (2, False, 1)
        return result.err

    second.rename(tmp_path / "second")
    (ranks / ".00001-of-00003.partial-17").mkdir()  # a task that was killed
    assert f"1 of 3 ranks are missing in {ranks}: 1; run the pipeline again" in refusal()
    shutil.copytree(ranks / "00002-of-00003", second)
    assert f"rank 2 is there twice, in {second} and {ranks / '00002-of-00003'}; delete one" in refusal()
    shutil.rmtree(second)
    documents: list[tuple[SplitName, Document]] = [("train", Document("text", [b"ab"]))]
    write_rank(ranks, documents, 1, 3, tokenizer=tokenizers["char"])
    assert f"{second} was made with another tokenizer than {ranks / '00000-of-00003'} (char, " in refusal()
    write_rank(ranks, documents, 1, 3, source="another")
    assert f"{second} is of 'another', {ranks / '00000-of-00003'} of 'a test'; run its task again" in refusal()
    shutil.rmtree(second)
    (tmp_path / "second").rename(second)
    write_rank(ranks, documents, 1, 8)
    assert f"{ranks} has ranks of 3 tasks and of 8 tasks; delete those of the other run" in refusal()
    shutil.rmtree(ranks / "00001-of-00008")
    tokens = second / "train-00000.tokens"
    content = tokens.read_bytes()
    tokens.write_bytes(content[::-1])
    assert f"{tokens}: damaged (sha256" in refusal()
    tokens.write_bytes(content)
    prepare(out=ranks / "other", documents={"train": ["ab"]})
    assert f"{ranks / 'other'} is a corpus, but not of a rank; give the folder" in refusal()
    shutil.rmtree(ranks / "other")
    out.mkdir()
    assert f"{out} exists already; choose another path" in txl("join", ranks, "--out", out).err
    out.rmdir()
    shutil.rmtree(ranks)
    assert f"no ranks in {ranks}; give the folder that datatrove's tasks wrote to" in refusal()
    write_ranks(ranks, [[("valid", "b")], []])
    assert f"no rank in {ranks} has text to train on; look whether" in refusal()
