"""`txl analyze`: tables for people, JSON for programs, one line for what cannot be."""

import json

import pytest
from refusals import txl

QUICK = ["analyze", "speed", "tiny", "--attention-windows", "8,16", "--segment-lengths", "4"]
QUICK += ["--repeats", "1", "--dtype", "float32"]


def test_speed_shows_two_tables_and_writes_the_figures(tmp_path):
    out = tmp_path / "speed.json"
    said = txl(*QUICK, "--out", out)
    assert said.status == 0
    assert "attention scores stored" in said.out
    assert "fused causal attention" in said.out
    figures = json.loads(out.read_text())
    assert [row["attention_window"] for row in figures["rows"]] == [8, 16]
    assert figures["dtype"] == "float32"
    assert txl(*QUICK, "--json").object.keys() == figures.keys()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["tinny"], "no recipe 'tinny'"),
        (["tiny", "--attention-windows", "8,x"], "--attention-windows 8,x: must be"),
        (["tiny", "--segment-lengths", "0"], "--segment-lengths 0: must be"),
        (["tiny", "--repeats", "0"], "repeats 0: wanted 1 or more"),
        (["tiny", "--clamp-length", "0"], "clamp_length 0: wanted 1 or more"),
        (["enwik8-al-rfou-12l"], "is compared for Transformer-XL"),
    ],
)
def test_speed_refuses(words, text):
    assert text in refused("analyze", "speed", *words)


def test_speed_writes_over_nothing(tmp_path):
    out = tmp_path / "there.json"
    out.write_text("mine")
    assert "exists already" in refused(*QUICK, "--out", out)
    assert out.read_text() == "mine"


def refused(*words) -> str:
    said = txl(*words)
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    return said.err
