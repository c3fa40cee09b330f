"""Runs side by side: what their folders recorded, the settings that differ, and losses on one text with intervals."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from library_tokenizers import word_piece
from refusals import assert_refused, files, txl
from small_runs import make_run
from training_runs import MODEL, OPTIONS, TRAIN, StopAt, make_corpus

from transformer_xl import (
    CommonText,
    RunRecord,
    UserError,
    compare_runs,
    draw_curves,
    evaluate,
    list_runs,
    load,
    score,
    train,
)
from transformer_xl.apps.runs.curves import text_curves
from transformer_xl.apps.runs.records import COLUMNS
from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.plots import write_plot
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.tokenizers import ByteTokenizer, load_tokenizer
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

EARLIER = Path(__file__).parents[2] / "earlier" / "0.1.0"
WORDS = ("a", "judge", "heard", "the", "workers", "and", "union", "received", "an", "offer", "it", "was", "too", "low")
INTERVALS = {"eval_interval": 5, "checkpoint_interval": 5, "log_interval": 2, "eval_tokens": 300}


def text_of(length: int, seed: int) -> bytes:
    """Return lines of five random words."""
    drawn = np.random.default_rng(seed).choice(WORDS, (length, 5))
    return "".join(" ".join(line) + "\n" for line in drawn).encode()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of bytes and one of words of the same text, and runs: a, b (stopped), words, two hurt."""
    folder = tmp_path_factory.mktemp("made") / "w"
    folder.mkdir()
    texts = {"train": text_of(90, seed=1), "valid": text_of(150, seed=2)}
    corpus = make_corpus(folder / "corpus", *texts.values())
    words = write_corpus(
        folder / "corpus-words",
        {name: [Document(name, [text])] for name, text in texts.items()},
        name="words",
        source="a test",
        tokenizer=WordTokenizer(("<eos>", "<unk>", *WORDS), eos_token="<eos>", unk_token="<unk>"),
    )
    runs, settings = folder / "runs", {"train": {**TRAIN, **INTERVALS}, "evaluation": {"segment_length": 90}}
    train(None, corpus, runs / "a", model=MODEL, **settings, **OPTIONS)
    wide = {**MODEL, "n_layers": 1, "d_ff": 31}
    train(None, corpus, runs / "group" / "b", model=wide, **settings, callbacks=[StopAt(8)], **OPTIONS)
    train(None, words, runs / "words", model=MODEL, **settings, **OPTIONS)
    (folder / "page.txt").write_bytes(text_of(300, seed=3))
    half = shutil.copytree(runs / "a", runs / "half")
    (half / "config.yaml").unlink()
    (shutil.copytree(runs / "a", runs / "hurt") / "metrics.jsonl").write_text("{\n")
    return folder


def test_table_has_what_runs_recorded(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(made)
    shown = txl("runs", "--sort", "valid_nats_per_token", "--csv", tmp_path / "runs.csv", "--json")
    rows = shown.object["runs"]
    assert rows == list_runs("runs", sort="valid_nats_per_token")
    by_name = {row["run"]: row for row in rows}
    assert list(by_name)[3:] == ["runs/half", "runs/hurt"]
    assert "no config.yaml" in by_name["runs/half"]["problem"]
    assert "metrics.jsonl is damaged" in by_name["runs/hurt"]["problem"]
    valid = [row["valid_nats_per_token"] for row in rows[:3]]
    assert valid == sorted(valid)
    a, b = by_name["runs/a"], by_name["runs/group/b"]
    run = load("runs/a", device="cpu")
    assert a["parameters"] == run.model.num_parameters()
    assert a["memory_length"] == EvaluationPlan.of_run(run).context_limits.memory_length
    assert run.weights is not None
    assert a["valid_nats_per_token"] == run.weights.used.valid_nats_per_token
    assert (a["step"], a["max_steps"], a["finished"], a["tokens"]) == (17, 17, True, 17 * 3 * 7)
    assert (b["step"], b["max_steps"], b["finished"]) == (8, 17, False)
    assert a["train_nats_per_token"] == min(
        line["nats_per_token"] for line in RunRecord.read("runs/a").metrics if line["split"] == "train"
    )
    with (tmp_path / "runs.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["run"] for row in table] == [row["run"] for row in rows]
    assert tuple(table[0]) == COLUMNS
    plain = txl("runs")
    assert plain.out.count("runs/") == 3
    assert plain.err.count("damaged run: ") == 2


def test_damaged_weights_and_earlier_versions_are_listed(made: Path, tmp_path: Path) -> None:
    """No weights are read, and runs of 0.1 lack some records."""
    run = shutil.copytree(made / "runs" / "a", tmp_path / "run")
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-9] ^= 255
    (run / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="checksum"):
        load(run)
    assert {**list_runs(run)[0], "run": ""} == {**RunRecord.read(made / "runs" / "a").as_dict(), "run": ""}
    rows = {Path(row["run"]).name: row for row in list_runs(EARLIER)}
    assert {"trained", "resumable", "adapter"} <= rows.keys()
    assert [row["problem"] for row in rows.values()] == [None] * len(rows)
    assert rows["resumable"]["commit"] is None


def test_run_that_saved_nothing_yet_is_listed_and_settings_of_others_are_not(made: Path, tmp_path: Path) -> None:
    for name, content in {"new": (made / "runs" / "a" / "config.yaml").read_text(), "other": "port: 1\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(content)
    (row,) = list_runs(tmp_path)
    assert (Path(row["run"]).name, row["step"], row["finished"]) == ("new", 0, False)


def test_tokens_count_changes_of_the_batch_size(made: Path) -> None:
    record = RunRecord.read(made / "runs" / "a")
    change = {"step": 12, "before": {"batch_size": 5}, "after": {"batch_size": 3}}
    config = type(record.config).model_validate({**record.config.model_dump(), "history": [change]})
    changed = RunRecord(**{**vars(record), "config": config})
    assert changed.tokens == (12 * 5 + 5 * 3) * 7


def test_losses_on_a_split_are_those_of_evaluate(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    before = files(made / "runs")
    shown = txl("runs", "compare", "runs/a", "runs/group/b", "--split", "valid", "--json").object
    assert files(made / "runs") == before
    assert shown["settings"] == {"model.n_layers": [2, 1], "model.d_ff": [19, 31]}
    assert shown["measure"] == "nats_per_token"
    assert [row["run"] for row in shown["losses"]] == ["a", "b"]
    nats, names = [], ("a", "group/b")
    for name, row in zip(names, shown["losses"], strict=True):
        run = load(f"runs/{name}", device="cpu")
        found = evaluate(run, "valid")
        assert row["nats_per_token"] == pytest.approx(found.nats_per_token, rel=1e-12)
        assert row["bits_per_byte"] == pytest.approx(found.bits_per_byte, rel=1e-12)
        plan, split = EvaluationPlan.of_run(run), run.open_corpus().split("valid")
        text = TokenizedText(split.tokens, run.tokenizer.bos_token_id, split.document_starts)
        nats.append(losses_in_order(plan.model_of(run), text, plan))
    delta_K = nats[1] - nats[0]
    row = shown["losses"][1]
    assert row["difference"] == pytest.approx(delta_K.mean(), rel=1e-9)
    # the interval of a mean of segments, by their standard deviation
    size = len(delta_K) // (len(delta_K) // 128)
    sums = np.array([part.mean() for part in np.array_split(delta_K, len(delta_K) // 128)])
    assert size >= 128
    half = 1.96 * sums.std() / math.sqrt(len(sums))
    assert row["difference_high"] - row["difference_low"] == pytest.approx(2 * half, rel=0.12)
    assert row["difference_low"] < row["difference"] < row["difference_high"]
    assert f"bootstrap over {len(sums)} segments of 128 tokens or more" in shown["text"]


def test_other_tokenizers_are_compared_by_byte(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    runs = ["runs/a", "runs/words", "runs/group/b"]
    content = Path("page.txt").read_bytes()
    shown = txl("runs", "compare", *runs, "--on", "page.txt", "--json").object
    assert shown["measure"] == "bits_per_byte"
    assert "groups of lines of 512 bytes or more" in shown["text"]
    for name, row in zip(runs, shown["losses"], strict=True):
        (found,) = score(load(name, device="cpu"), {"page": content})
        assert row["bits_per_byte"] == pytest.approx(found.sums.nats / math.log(2) / len(content), rel=1e-12)
        assert row["tokens"] == found.sums.tokens
    first, words, _ = shown["losses"]
    assert words["difference"] == pytest.approx(words["bits_per_byte"] - first["bits_per_byte"])
    assert words["difference_low"] < words["difference"] < words["difference_high"]
    # a corpus gives the same text, where its tokens do; the third run has the same differences with fewer others
    records = [RunRecord.read(run) for run in runs]
    text = CommonText.open(records, corpus="corpus")
    assert b"".join(text.pieces) == text_of(150, seed=2)
    with pytest.raises(UserError, match=r"tokenizer of corpus-words is not that of all .*: on=FILE"):
        CommonText.open(records, corpus="corpus-words")
    alone = txl("runs", "compare", "runs/a", "runs/group/b", "--on", "page.txt", "--json").object["losses"][1]
    assert alone["difference"] / math.log(2) == pytest.approx(shown["losses"][2]["difference"], rel=1e-3)
    table = txl("runs", "compare", *runs, "--on", "page.txt").out
    assert f"{words['difference']:+.4f} ({words['difference_low']:+.4f} to" in table


def test_bytes_of_a_part_are_those_of_its_tokens(tmp_path: Path) -> None:
    """As in `evaluate`: tokens at the start of a split need not be as long as those of the rest."""
    text = b"aaaa bbbb\n" * 50 + "\u65e5\u672c\u8a9e\n".encode() * 50
    tokenizer = train_bpe([["aaaa bbbb\n"] * 20], 280)
    splits = {name: [Document(name, [text])] for name in ("train", "valid")}
    corpus = write_corpus(tmp_path / "corpus", splits, name="part", source="a test", tokenizer=tokenizer)
    runs = [make_run(tmp_path / name, tokenizer=tokenizer, noise=0.1).path for name in "ab"]
    opened = CommonText.open([RunRecord.read(run) for run in runs], corpus=corpus.path, max_tokens=90)
    found = evaluate(load(runs[0], device="cpu"), corpus.split("valid"), max_tokens=90)
    for row in compare_runs(runs, opened, device="cpu").losses[:1]:
        assert row["nats_per_token"] == pytest.approx(found.nats_per_token, rel=1e-12)
        assert row["bits_per_byte"] == pytest.approx(found.bits_per_byte, rel=1e-12)


def test_lines_without_tokens_are_compared(tmp_path: Path) -> None:
    """Empty lines, also the first and the last, and lines of what a tokenizer leaves out; no text without any token."""
    page, none = tmp_path / "page.txt", tmp_path / "none.txt"
    page.write_bytes(b"\n\n" + text_of(250, seed=3).replace(b"\n", b"\n \n\n") + "\u00ad\n\n".encode())
    none.write_bytes(b"\n \n")
    (tmp_path / "tokenizer.json").write_text(json.dumps(word_piece()))
    tokenizers = {
        "bytes": ByteTokenizer(),
        "pieces": load_tokenizer(tmp_path / "tokenizer.json"),
        "words": WordTokenizer(("<unk>", *WORDS), unk_token="<unk>"),
    }
    runs = [make_run(tmp_path / name, tokenizer=one, noise=0.1).path for name, one in tokenizers.items()]
    records = [RunRecord.read(run) for run in runs]
    losses = compare_runs(runs, CommonText.open(records, on=page), device="cpu").losses
    for run, row in zip(runs, losses, strict=True):
        (found,) = score(load(run, device="cpu"), page.read_bytes())
        assert row["tokens"] == found.sums.tokens
        assert row["bits_per_byte"] == pytest.approx(found.sums.nats / math.log(2) / page.stat().st_size, rel=1e-6)
        assert row is losses[0] or row["difference_low"] < row["difference"] < row["difference_high"]
    for content in (none.read_bytes(), b""):
        none.write_bytes(content)
        with pytest.raises(UserError, match=r"none.txt: the text is empty; give one with at least one token"):
            compare_runs(runs, CommonText.open(records, on=none), device="cpu")


def test_part_of_a_split_ends_with_a_whole_character(tmp_path: Path) -> None:
    text = "\u65e5\u672c\u8a9e\n" * 9
    corpus = make_corpus(tmp_path / "corpus", text.encode(), text.encode())
    characters = CharTokenizer("\u65e5\u672c\u8a9e\n")
    runs = [make_run(tmp_path / "a").path, make_run(tmp_path / "b", tokenizer=characters).path]
    records = [RunRecord.read(run) for run in runs]
    for number in (27, 28, 29, 30):
        opened = CommonText.open(records, corpus=corpus.path, max_tokens=number)
        assert b"".join(opened.pieces).decode() == text[: number // 10 * 4 + number % 10 // 3]
        assert compare_runs(runs, opened, device="cpu").losses[1]["tokens"] == number // 10 * 4 + number % 10 // 3


def test_unknown_words_and_lengths_below_1_are_said(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    (tmp_path / "page.txt").write_bytes(text_of(300, seed=3) + b"zzcat\n")
    shown = txl("runs", "compare", "runs/a", "runs/words", "--on", tmp_path / "page.txt")
    assert [line for line in shown.err.splitlines() if "vocabulary" in line] == [
        "note: words: not in the vocabulary, and read as <unk>: 'zzcat'"
    ]
    for number in (0, -5):
        words = f"runs compare runs/a runs/group/b --split valid --max-tokens {number}"
        assert_refused(made, words, f"--max-tokens {number}: must be 1 or more", capfd)


def test_short_text_has_no_interval(made: Path) -> None:
    runs = [made / "runs" / "a", made / "runs" / "group" / "b"]
    text = CommonText.open([RunRecord.read(run) for run in runs], corpus=made / "corpus", max_tokens=1200)
    comparison = compare_runs(runs, text, device="cpu")
    assert comparison.losses[1]["difference_low"] is None
    assert "no interval, as it has fewer than 10 segments of 128 tokens" in str(comparison.text)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_curves_are_drawn(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str) -> None:
    monkeypatch.chdir(made)
    out = tmp_path / f"curves.{suffix}"
    assert txl("plot", "runs/a", "runs/group/b", "--out", out).status == 0
    again = tmp_path / f"compared.{suffix}"
    assert txl("runs", "compare", "runs/a", "runs/group/b", "--plot", again).status == 0
    assert out.read_bytes() == again.read_bytes()
    assert out.stat().st_size > 20_000


def test_labels_are_names_and_no_formulas(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = {name: RunRecord.read(made / "runs" / "a") for name in ("_old", "x$^$", "\u65e5b\u00e9")}
    figure = draw_curves(records)
    write_plot(tmp_path / "curves.svg", figure)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[::2] == [" _old", r"x\$^\$", r"\u65e5b\xe9".replace(r"\xe9", "\u00e9")]


def test_a_run_without_metrics_does_not_change_the_scale(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotext")
    trained = {"a": RunRecord.read(made / "runs" / "a")}
    bare = RunRecord.read(make_run(tmp_path / "bare").path)
    bare = replace(bare, config=bare.config.model_copy(update={"corpus": trained["a"].config.corpus}))
    assert text_curves({**trained, "bare": bare}) == text_curves(trained)


def test_curves_in_the_terminal(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotext")
    monkeypatch.chdir(made)
    shown = txl("plot", "runs/a", "runs/words", "--text").out
    assert "loss in bits per byte" in shown
    assert "\x1b" not in shown
    assert not Path("curves.svg").exists()


REFUSED = [
    ("runs empty", "no run below empty; give a folder with runs"),
    ("runs gone", "no folder gone; give"),
    ("runs --sort tokns", r"no column 'tokns' \(did you mean 'tokens'\?\); the columns are run, recipe"),
    ("runs --csv page.txt", "page.txt exists already"),
    ("runs compare runs/a", "a comparison needs two runs or more"),
    ("runs compare runs/a runs/a", "runs/a was given twice"),
    ("runs compare runs/a corpus", "corpus: not the folder of a run .*; expected a folder"),
    ("runs compare runs/a runs/hurt", "metrics.jsonl is damaged"),
    ("runs compare runs/a runs/words --split valid", "trained on .*corpus and .*words, so no .* --on FILE or --corpus"),
    ("runs compare runs/a runs/group/b --split tset", "no split 'tset'"),
    ("runs compare runs/a runs/group/b --on page.txt --split valid", "--split and --max-tokens are for a corpus"),
    ("runs compare runs/a runs/group/b --on page.txt --corpus corpus", "--on FILE and --corpus DIR were both given"),
    ("runs compare runs/a runs/group/b --plot x.pdf", "must end in .svg or .png"),
    ("plot", "no run was given"),
    ("plot runs/half", "not the folder of a run"),
]


def test_one_folder_and_no_run_are_refused(made: Path) -> None:
    for runs in (made / "runs" / "a", str(made / "runs" / "a")):
        with pytest.raises(UserError, match=r"runs is one folder, '.*a'; give a list"):
            compare_runs(runs)
    with pytest.raises(UserError, match="no run was given to draw; give one or more"):
        draw_curves({})
    for call in (
        lambda: draw_curves([str(made / "runs" / "a")]),
        lambda: draw_curves({"a": str(made / "runs" / "a")}),
        lambda: CommonText.open([made / "runs" / "a"], on=made / "page.txt"),
        lambda: compare_runs([made / "runs" / "a", made / "runs" / "b"], "page.txt"),
    ):
        with pytest.raises(UserError, match="give "):
            call()


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_bad_input_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    monkeypatch.chdir(made)
    (made / "empty").mkdir(exist_ok=True)
    assert_refused(made, words, message, capfd)
