"""Named data sets, such as enwik8: download URLs, checksums, splits and default tokenizers.

Sizes, checksums, special tokens and counts are explained for users in `docs/data.md`. To add a data set, add an entry
to `DOWNLOADABLE`.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.sources.archives import FileDigest, FileRange, Progress, no_progress
from transformer_xl.text.sources.download import RemoteFile, TextFile, find_files
from transformer_xl.text.sources.folders import list_files
from transformer_xl.text.sources.splitting import hash_fraction
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

PYTHON_STDLIB = "python-stdlib"
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SplitFile:
    """A text, or a range of its bytes, that belongs to a split."""

    text: TextFile
    start: int = 0
    stop: int | None = None
    """End position in bytes, or None for the end of the text."""


@dataclass(frozen=True)
class NamedDataset(TextSource):
    """A data set that is downloaded from its distributors; `splits` is empty until `open`, which returns a copy.

    `tokenizer` has no `vocab_file` until then either, and `expected_num_tokens` includes end-of-sequence tokens. Where
    `tokenizer_splits` is `SPLITS`, the vocabulary comes from all three splits, as in the code of the Transformer-XL
    authors.
    """

    files: Mapping[SplitName, tuple[SplitFile, ...]] = field(default_factory=dict)
    """The files of each split."""
    archive: RemoteFile = field(kw_only=True)
    """The archive in which the texts are distributed."""
    vocab_file: TextFile | None = None
    """Vocabulary file of the default tokenizer, or None if none is distributed."""

    def open(
        self, data_dir: Path | None = None, progress: Progress = no_progress, *, kind: str | None = None
    ) -> TextSource:
        """Find or download the texts, and verify them.

        Args:
            data_dir: a file or folder that contains the texts, or None to use earlier downloads or the network.
            progress: called while files are downloaded, extracted and checked.
            kind: the kind of tokenizer that will encode the texts, or None for the default tokenizer.

        Raises:
            UserError: a file is missing, damaged, has the wrong checksum, or cannot be downloaded.
        """
        texts = list(dict.fromkeys(file.text for files in self.files.values() for file in files))
        vocab_file = self.vocab_file if kind in (None, self.tokenizer.kind) else None
        found = find_files(self.name, self.archive, [*texts, *filter(None, [vocab_file])], data_dir, progress)
        tokenizer = self.tokenizer
        if vocab_file:
            tokenizer = tokenizer.model_copy(update={"vocab_file": str(found[vocab_file].path)})
        splits: dict[SplitName, list[Document]] = {}
        for split, files in self.files.items():
            ranges = [replace(found[file.text], start=file.start, stop=file.stop) for file in files]
            splits[split] = [Document(text.name, text, text.size()) for text in ranges]
        return replace(self, splits=splits, tokenizer=tokenizer)


_MAHONEY_SPLIT = "first 90,000,000 bytes train, next 5,000,000 valid, last 5,000,000 test"


def _mahoney(name: str, checksum: str) -> dict[SplitName, tuple[SplitFile, ...]]:
    """Return the splits of a data set of Matt Mahoney, one file of 100,000,000 bytes."""
    text = TextFile(name, FileDigest(100_000_000, checksum))
    return {
        "train": (SplitFile(text, start=0, stop=90_000_000),),
        "valid": (SplitFile(text, start=90_000_000, stop=95_000_000),),
        "test": (SplitFile(text, start=95_000_000, stop=100_000_000),),
    }


# WikiText-103 and WikiText-2 have the same valid and test texts. The train texts have no checksums here (None): only
# the archives that contain them are verified.
_WIKITEXT: dict[SplitName, FileDigest | None] = {
    "train": None,
    "valid": FileDigest(1_121_681, "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    "test": FileDigest(1_256_449, "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
}
_PTB: dict[SplitName, FileDigest] = {
    "train": FileDigest(5_101_618, "sha256:fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    "valid": FileDigest(399_782, "sha256:c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    "test": FileDigest(449_945, "sha256:dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
}
_PTB_URL = "https://raw.githubusercontent.com/{owner}/lstm/master/data/ptb.{split}.txt"


def _wikitext(folder: str) -> dict[SplitName, tuple[SplitFile, ...]]:
    return {
        split: (SplitFile(TextFile(f"{folder}/wiki.{split}.tokens", digest, other_names=(f"{split}.txt",))),)
        for split, digest in _WIKITEXT.items()
    }


def _ptb(split: SplitName, digest: FileDigest) -> SplitFile:
    urls = tuple(_PTB_URL.format(owner=owner, split=split) for owner in ("wojzaremba", "tomsercu"))
    # the last two arguments are other_names and urls
    return SplitFile(TextFile(f"simple-examples/data/ptb.{split}.txt", digest, (f"{split}.txt",), urls))


_LM1B = "1-billion-word-language-modeling-benchmark-r13output"


def _lm1b(folder: str, name: str) -> SplitFile:
    return SplitFile(TextFile(f"{_LM1B}/{folder}-monolingual.tokenized.shuffled/{name}"))


DOWNLOADABLE: dict[str, NamedDataset] = {
    dataset.name: dataset
    for dataset in (
        NamedDataset(
            "enwik8",
            f"the first 100,000,000 bytes of an XML dump of the English Wikipedia of 2006; {_MAHONEY_SPLIT}",
            files=_mahoney("enwik8", "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),
            archive=RemoteFile(
                "enwik8.zip",
                (
                    "https://mattmahoney.net/dc/enwik8.zip",
                    "http://mattmahoney.net/dc/enwik8.zip",
                    "https://cs.fit.edu/~mmahoney/compression/enwik8.zip",
                ),
                FileDigest(36_445_475, "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
            ),
        ),
        NamedDataset(
            "text8",
            f"100,000,000 letters and spaces of the English Wikipedia of 2006; {_MAHONEY_SPLIT}",
            files=_mahoney("text8", "sha1:0dc3edebc970dcc96137e7deda4d9995af9d93de"),
            archive=RemoteFile(
                "text8.zip",
                ("https://mattmahoney.net/dc/text8.zip", "http://mattmahoney.net/dc/text8.zip"),
                FileDigest(31_344_016, "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
            ),
            tokenizer=TokenizerConfig(kind="char", byte_fallback=False),
            tokenizer_splits=SPLITS,
        ),
        NamedDataset(
            "wikitext-103",
            "WikiText-103: good and featured articles of the English Wikipedia, as words; its own three splits",
            files=_wikitext("wikitext-103"),
            archive=RemoteFile(
                "wikitext-103-v1.zip",
                ("https://wikitext.smerity.com/wikitext-103-v1.zip",),
                FileDigest(190_229_076, "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
            ),
            tokenizer=TokenizerConfig(kind="word"),
            expected_num_tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        ),
        NamedDataset(
            "wikitext-2",
            "WikiText-2: a small part of WikiText-103 with the same valid and test texts; its own three splits",
            files=_wikitext("wikitext-2"),
            archive=RemoteFile(
                "wikitext-2-v1.zip",
                ("https://wikitext.smerity.com/wikitext-2-v1.zip",),
                FileDigest(4_475_746, "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
            ),
            tokenizer=TokenizerConfig(kind="word"),
            tokenizer_splits=SPLITS,
            expected_num_tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        ),
        NamedDataset(
            "ptb",
            "the Penn Treebank as distributed for language modelling, 10,000 words, a sentence a line; its own splits",
            files={split: (_ptb(split, digest),) for split, digest in _PTB.items()},
            archive=RemoteFile(
                "simple-examples.tgz",
                (
                    "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
                    "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
                ),
                FileDigest(34_869_662, "md5:30177ea32e27c525793142b6bf2c8e2d"),
            ),
            tokenizer=TokenizerConfig(kind="word", lowercase=True),
            tokenizer_splits=SPLITS,
            expected_num_tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        ),
        NamedDataset(
            "lm1b",
            "One Billion Word: news sentences in random order; training files 1 to 99, heldout files 1 (valid) "
            "and 0 (test)",
            files={
                "train": tuple(_lm1b("training", f"news.en-{index:05}-of-00100") for index in range(1, 100)),
                "valid": (_lm1b("heldout", "news.en.heldout-00001-of-00050"),),
                "test": (_lm1b("heldout", "news.en.heldout-00000-of-00050"),),
            },
            archive=RemoteFile(
                f"{_LM1B}.tar.gz",
                (
                    f"http://www.statmt.org/lm-benchmark/{_LM1B}.tar.gz",
                    f"https://www.statmt.org/lm-benchmark/{_LM1B}.tar.gz",
                ),
                FileDigest(1_792_209_805, "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"),
            ),
            # the special tokens as the vocabulary file spells them
            tokenizer=TokenizerConfig(kind="word", eos_token="<S>", unk_token="<UNK>"),
            document_unit="line",
            vocab_file=TextFile(
                "1b_word_vocab.txt",
                FileDigest(9_507_106, "sha1:aa2322a3da82ef628011336c9b5c6059e4f56c3f"),
                urls=(
                    "https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt",
                    "https://raw.githubusercontent.com/rafaljozefowicz/lm/master/1b_word_vocab.txt",
                ),
            ),
        ),
    )
}
"""The data sets that can be downloaded, by name."""

DATASET_NAMES = (*DOWNLOADABLE, PYTHON_STDLIB)


def python_stdlib() -> TextSource:
    """Return the source code of Python's standard library without its tests, a text that every installation has.

    The sha256 of its path assigns each file to a split (train 90%, valid 5%, test 5%), so a file stays in its split
    across Python versions. Files of a split are sorted by that hash, since in path order hundreds of similar files
    (encodings, idlelib) would be adjacent and dominate some batch rows of a short training.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in list_files(folder, skip=_STDLIB_SKIPPED) if path.suffix == ".py"]
    path_of_name = {path.relative_to(folder).as_posix(): path for path in paths}
    splits: dict[SplitName, list[Document]] = {split: [] for split in SPLITS}
    for name in sorted(path_of_name, key=hash_fraction):
        text = FileRange(path_of_name[name])
        text = replace(text, stop=text.size())
        fraction = hash_fraction(name)
        split: SplitName = "train" if fraction < 0.9 else "valid" if fraction < 0.95 else "test"
        splits[split].append(Document(name, text, text.size()))
    return TextSource(
        PYTHON_STDLIB,
        f"standard library of Python {platform.python_version()} without its tests, split by the sha256 of each path",
        splits,
    )
