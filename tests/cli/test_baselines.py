"""Baseline architectures on the command line: what works, and errors that print one line and exit with status 2.

The architectures are lstm, qrnn, vaswani (a transformer with sinusoidal positions), al-rfou (with learned positions)
and shaw (with the relative positions of Shaw et al. 2018).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import NO_RECIPE, assert_refused, do, txl

Capture = pytest.CaptureFixture[str]
SIZES = "--model.n-layers 1 --model.d-model 16"
SHORT = "--train.segment-length 7 --train.batch-size 3 --train.max-steps 2 --train.warmup-steps 0 --train.dtype float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, a run of an LSTM and a run of Al-Rfou et al.'s model (al-rfou), whose positions are
    learned."""
    folder = tmp_path_factory.mktemp("baselines") / "w"
    folder.mkdir()
    (folder / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(99)))
    do(f"prepare {folder}/text.txt --out {folder}/corpus")
    for name in ("lstm", "al-rfou"):
        flags = f"{SIZES} {SHORT} --model.architecture {name}"
        do(f"train {NO_RECIPE} --corpus {folder}/corpus --run {folder}/{name} {flags}")
    return folder


def test_baselines_evaluate_and_generate(folder: Path) -> None:
    """Otherwise, the errors below might have other reasons."""
    for name in ("lstm", "al-rfou"):
        assert txl("evaluate", folder / name, "--max-tokens", "50", "--json").object
        result = txl("generate", folder / name, "--prompt", "line", "--max-new-tokens", "13")
        assert (result.status, result.warnings, bool(result.out)) == (0, "", True)
        info = txl("info", folder / name, "--json").object["run"]
        assert (info["attn_implementation"], info["model"]["architecture"]) == (None, name)


def test_advice_of_the_warning_on_windows_can_be_followed(folder: Path) -> None:
    """Without a memory, no memory length fills the window."""
    command = ["evaluate", folder / "al-rfou", "--max-tokens", "50", "--json", "--attention-window", "4"]
    assert "or for a model without memory method sliding-window, to fill it" in txl(*command).err
    assert txl(*command, "--method", "sliding-window").warnings == ""
    sweep = [*command[:-2], "--sweep-attention-window", "3,5"]
    assert [one["memory_length"] for one in txl(*sweep).object["sweep"]] == [0, 0]


def test_architecture_flag_drops_settings_that_it_does_not_have(folder: Path) -> None:
    """The recipe sets the heads of a transformer; an LSTM has none."""
    flags = f"{SIZES} {SHORT} --model.architecture lstm"
    do(f"train ablation --corpus {folder}/corpus --run {folder}/from-recipe {flags}")
    assert txl("info", folder / "from-recipe", "--json").object["run"]["model"]["d_model"] == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.architecture lsmt", "model.architecture|lsmt"),
        ("--model.architecture lstm --model.qrnn-kernel-size 1", "qrnn_kernel_size is a setting of qrnn, .* lstm"),
        (
            "--model.architecture al-rfou --model.clamp-length 3",
            "clamp_length is a setting of transformer-xl, xlnet, shaw",
        ),
        ("--model.architecture lstm --model.attention-window 3", "attention_window is a setting of .* this is .* lstm"),
        ("--model.architecture qrnn --evaluation.clamp-length 3", "qrnn has no clamp_length; give none"),
        ("--model.architecture lstm --train.compile layers", "train.compile layers is not for lstm"),
        ("--model.architecture vaswani --train.memory-length 7", "vaswani has no memory; give memory_length 0"),
        ("--model.architecture al-rfou --model.max-position-embeddings 5", "7 tokens at once are more than the 5 posi"),
        ("--model.architecture shaw --model.max-relative-positions 999", "relative-positions 999 is more than"),
        ("--model.num-targets 2", "num_targets is a setting of vaswani, al-rfou, and this is .* transformer-xl"),
    ],
)
def test_invalid_setting_is_refused(folder: Path, capfd: Capture, flags: str, message: str) -> None:
    assert_refused(
        folder, f"train {NO_RECIPE} --corpus {folder}/corpus --run {folder}/new {SIZES} {SHORT} {flags}", message, capfd
    )


# {} is the folder of the fixture
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate {}/lstm --attention-window 3", "lstm has no --attention-window; give none"),
        ("evaluate {}/lstm --clamp-length 3", "lstm has no --clamp-length; give none"),
        ("evaluate {}/al-rfou --memory-length 5", "al-rfou has no memory; give --memory-length 0"),
        # the model has as many learned positions as a segment of training has tokens
        ("evaluate {}/al-rfou --segment-length 8", "8 tokens at once .* the 7 positions .*give 7 at most as --segm"),
        ("evaluate {}/al-rfou --extended-context-length 2", "9 tokens .* --segment-length and --extended-context"),
        ("evaluate {}/al-rfou --method sliding-window --attention-window 8", "8 tokens .* or as --attention-window"),
        ("generate {}/al-rfou --prompt line --memory-length 5", "al-rfou has no memory; give --memory-length 0"),
        ("train --resume {}/al-rfou --train.max-steps 3 --model.num-targets 2", "cannot change within a run"),
    ],
)
def test_invalid_length_is_refused(folder: Path, capfd: Capture, words: str, message: str) -> None:
    assert_refused(folder, words.format(folder), message, capfd)
