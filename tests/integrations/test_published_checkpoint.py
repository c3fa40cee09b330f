"""The section of docs/migrating.md on the Hub's transfo-xl-wt103: its code runs with a small folder of that layout."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from integrations.checkpoints.checkpoints import hub_folder
from refusals import txl
from text_sources import make_files, without_digests
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformer_xl.config import load_recipe, merge_recipe, run_settings
from transformer_xl.integrations.checkpoints.huggingface import read_settings
from transformer_xl.text.sources.named_datasets import DOWNLOADABLE

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## The Hub's transfo-xl-wt103\n")[1].split("\n## ")[0]
USE, EVALUATE = re.findall(r"^```sh\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
(PYTHON,) = re.findall(r"^```python\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
# config.json of the published checkpoint
PUBLISHED = {
    "adaptive": True, "attn_type": 0, "clamp_len": 1000, "cutoffs": [20000, 40000, 200000], "d_embed": 1024,
    "d_head": 64, "d_inner": 4096, "d_model": 1024, "div_val": 4, "dropatt": 0.0, "dropout": 0.1, "eos_token_id": 0,
    "ext_len": 0, "init": "normal", "init_range": 0.01, "init_std": 0.02, "layer_norm_epsilon": 1e-05, "mem_len": 1600,
    "model_type": "transfo-xl", "n_head": 16, "n_layer": 18, "pre_lnorm": False, "proj_init_std": 0.01,
    "same_length": True, "sample_softmax": -1, "tgt_len": 128, "tie_projs": [False, True, True, True],
    "tie_weight": True, "untie_r": True, "vocab_size": 267735,
}  # fmt: skip


@pytest.mark.parametrize("vocabulary", ["vocab.pkl", "vocab.bin"])
def test_code_of_the_section_runs(
    vocabulary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DOWNLOADABLE, "wikitext-103", without_digests(DOWNLOADABLE["wikitext-103"]))
    texts = {f"{split}.txt": b" the well known cat , sat on <unk> mat . \n \n" for split in ("train", "valid", "test")}
    make_files(tmp_path / "wikitext", texts)
    download, *commands = [shlex.split(line) for line in USE.splitlines()]
    assert download[:3] == ["hf", "download", "transfo-xl/transfo-xl-wt103"]
    (tmp_path / "downloads").mkdir()
    folder = hub_folder(Path(download[download.index("--local-dir") + 1]), vocabulary)
    assert [words[:2] for words in commands] == [["txl", "convert"], ["txl", "generate"]]
    for _, *words in commands:
        assert txl(*words).status == 0

    for line in EVALUATE.splitlines():
        _, *words = shlex.split(line)
        more = ["--data-dir", "wikitext"] if words[0] == "prepare" else []
        assert txl(*words, *more).status == 0
        if words[0] == "evaluate":
            evaluated = txl(*words, "--json").object
            assert (evaluated["memory_length"], evaluated["attention_window"]) == (9, 9)  # mem_len and same_length

    exec(compile(PYTHON, "docs/migrating.md", "exec"), {})
    assert capsys.readouterr().out.startswith("\n<unk> <unk> <unk> the <unk>")  # <eos>, and the prompt's words

    # both ways give the same text
    run = commands[0][-1]
    ours = txl("generate", run, "--prompt", "the cat", "--max-new-tokens", "30", "--temperature", "0", "--json")
    tokenizer = AutoTokenizer.from_pretrained(folder, add_bos_token=True)
    inputs = tokenizer("the cat", return_tensors="pt")
    made_BT = AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, max_new_tokens=30)
    new_T = made_BT[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(torch.cat([inputs["input_ids"][0, 1:], new_T])) == "the cat" + ours.object["text"]


def test_settings_of_the_published_checkpoint_are_those_of_the_recipe() -> None:
    model, lengths = read_settings(PUBLISHED, "config.json")
    recipe = run_settings(merge_recipe(load_recipe("wikitext-103-large"), {}), "the recipe")
    # dropout changes no result, nor final_norm without norm_first, and imported models have the lengths of evaluation
    different = {"dropout", "attention_dropout", "attention_window", "clamp_length", "attend_empty_memory"}
    different |= {"d_embed", "final_norm"}  # None is d_model
    assert model.model_dump(exclude=different) == recipe.model.model_dump(exclude=different)
    evaluation = recipe.evaluation
    assert lengths == {"segment_length": evaluation.segment_length, "memory_length": evaluation.memory_length}
    assert (model.attention_window, model.clamp_length) == (evaluation.attention_window, evaluation.clamp_length)
