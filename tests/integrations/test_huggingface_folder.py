"""Folders for transformers 5: written by `txl convert` and by transformers, opened, and converted back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from integrations.checkpoints.checkpoints import WORDS, golden, hugging_face_folder
from integrations.checkpoints.golden_huggingface import CASES
from safetensors import safe_open
from small_runs import MODELS, ids, make_run, own_logits
from tensors import assert_same_tensors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from transformer_xl import convert, generate, load
from transformer_xl.config import UserError
from transformer_xl.integrations.huggingface import TransformerXLForCausalLM, TransformerXLTokenizersBackend, from_run

SRC = Path(__file__).parents[2] / "src"
FILES = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "transformer_xl_code.py", "txl_tokenizer.json",
}  # fmt: skip


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process."""
    variables = {**os.environ, "PYTHONPATH": str(SRC), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-W", "error::FutureWarning", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "xlnet"])  # its folders: checkpoints/test_xlnet.py
def test_round_trips_are_bit_equal(name: str, tmp_path: Path) -> None:
    """run -> convert -> transformers -> save_pretrained -> convert -> run."""
    run = make_run(tmp_path / "run", name)
    result = convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    assert {file.name for file in (tmp_path / "hub").iterdir()} == {*FILES, "README.md"}
    assert "transformers 5" in (result.readers or "")
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(loading.values())
    assert_same_tensors(model.model, run.model)
    assert_same_tensors([*model.model.buffers(), torch.zeros(1)], [*run.model.buffers(), torch.zeros(1)])
    ids_BT = ids(2, 23)
    with torch.no_grad():
        # within rounding: logits are up to 8, of which 1e-6 is two units in the last place
        torch.testing.assert_close(model(ids_BT).logits, own_logits(run, ids_BT), rtol=1e-6, atol=1e-6)
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "saved")
    assert {file.name for file in (tmp_path / "saved").iterdir()} >= FILES
    for source in ("hub", "saved"):
        convert(tmp_path / source, tmp_path / f"{source} back")
        back = load(tmp_path / f"{source} back", device="cpu")
        assert_same_tensors(back.model, run.model)
        assert (back.config.model, back.tokenizer.to_json()) == (run.config.model, run.tokenizer.to_json())
        assert back.config.train == run.config.train
        assert torch.equal(own_logits(back, ids_BT), own_logits(run, ids_BT))


def test_kernel_and_lengths_survive_the_round_trip(tmp_path: Path) -> None:
    evaluation = {"segment_length": 5, "memory_length": 17, "attention_window": 13, "clamp_length": 3}
    run = make_run(tmp_path / "run", attn_implementation="reference", evaluation=evaluation)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "hub" / "txl_tokenizer.json", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "back")
    assert load(tmp_path / "back", device="cpu").config.model == run.config.model
    back = load(tmp_path / "back", device="cpu").config.evaluation
    assert {name: getattr(back, name) for name in evaluation} == evaluation


def test_folder_is_written_without_transformers_and_the_same_each_time(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from transformer_xl import convert; convert(sys.argv[1], sys.argv[2], to='huggingface')"
    )
    assert python(code, tmp_path / "run", tmp_path / "a").stderr == ""
    convert(tmp_path / "run", tmp_path / "b", to="huggingface")
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_model_in_shards_and_other_number_formats(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "shards", max_shard_size=4000)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "shards").model, run.model)
    shutil.copy(tmp_path / "hub" / "txl_tokenizer.json", tmp_path / "shards")
    convert(tmp_path / "shards", tmp_path / "back")
    assert_same_tensors(load(tmp_path / "back", device="cpu").model, run.model)
    ids_BT = ids(2, 23)
    for dtype in (torch.bfloat16, torch.float64):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        with torch.no_grad():
            logits_BTV = model(ids_BT).logits
            assert logits_BTV.dtype == dtype
            torch.testing.assert_close(logits_BTV.float(), own_logits(run, ids_BT), rtol=0.05, atol=0.05)
        assert model.generate(ids_BT, max_new_tokens=3).shape == (2, 26)


def test_settings_can_be_changed_when_a_folder_is_opened(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", evaluation_memory_length=99, dropout=0.4)
    assert model(ids(1, 3)).past_key_values.memory.length == 99
    assert model.model.output_dropout.p == 0.4


def test_run_is_opened_without_a_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    model, tokenizer = from_run(str(tmp_path / "run"))
    assert isinstance(model, TransformerXLForCausalLM)
    assert isinstance(tokenizer, TransformerXLTokenizersBackend)
    assert not model.training
    ids_BT = ids(2, 23)
    with torch.no_grad():
        torch.testing.assert_close(model(ids_BT).logits, own_logits(run, ids_BT), rtol=0, atol=1e-6)
    assert from_run(run)[0].model is run.model
    for path, message in ((tmp_path / "none", "no such folder"), (tmp_path, "not the folder of a run")):
        with pytest.raises(UserError, match=message):
            from_run(path)
    (tmp_path / "run" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged"):
        from_run(tmp_path / "run")


def test_pushed_folder_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is a local folder here."""
    run = make_run(tmp_path / "run")
    model, tokenizer = from_run(tmp_path / "run")
    remote = tmp_path / "remote"
    remote.mkdir()

    def create_commit(self, repo_id: str, operations, **kwargs) -> None:
        for operation in operations:
            shutil.copy(operation.path_or_fileobj, remote / operation.path_in_repo)

    created = type("Created", (), {"repo_id": "me/model"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, *args, **kwargs: created)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *args, **kwargs: _Card())
    model.push_to_hub("me/model")
    tokenizer.push_to_hub("me/model")
    assert {file.name for file in remote.iterdir()} >= FILES
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(remote).model, run.model)
    assert AutoTokenizer.from_pretrained(remote)("the")["input_ids"] == list(b"the")


class _Card:
    def save(self, path: str) -> None:
        Path(path).write_text("a model")


OPEN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
arguments = {"trust_remote_code": True} if len(sys.argv) > 2 else {"trust_remote_code": False}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **arguments)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **arguments)
print(type(model).__module__, type(tokenizer).__name__, tokenizer("the")["input_ids"])
model.save_pretrained(sys.argv[2])
"""


def test_folder_opens_with_trust_remote_code_where_this_package_is_not_imported(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    home = {"HF_HOME": str(tmp_path / "home")}
    result = python(OPEN, tmp_path / "hub", tmp_path / "saved", **home)
    assert (
        "transformer_xl.integrations.huggingface.modeling TransformerXLTokenizersBackend [116, 104, 101]"
        in result.stdout
    )
    # what it saves has no copy of our code
    assert {file.name for file in (tmp_path / "saved").glob("*.py")} == {"transformer_xl_code.py"}
    assert "trust_remote_code" in python(OPEN, tmp_path / "hub", **home).stderr
    code = (tmp_path / "hub" / "transformer_xl_code.py").read_text()
    assert [line for line in code.splitlines() if "import" in line] == [
        "from transformer_xl.integrations.huggingface import ("
    ]


def test_code_in_a_folder_is_not_executed_by_convert(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    (tmp_path / "hub" / "transformer_xl_code.py").write_text("open('harm', 'w')")
    convert(tmp_path / "hub", tmp_path / "back")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert not Path("harm").exists()


@pytest.mark.parametrize("case", CASES)
def test_old_folders_open_without_conversion(case: str, tmp_path: Path) -> None:
    """Folders of transformers 4.37.2 with the model type `transfo-xl`."""
    config, weights, expected = golden(case)
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    convert(folder, tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_tensors(model.model, run.model)
    assert AutoConfig.from_pretrained(folder).model_config() == run.config.model
    tokens_BT = expected["tokens_BT"]
    made_BT = model.generate(tokens_BT[:1, :4], max_new_tokens=17)
    if config["mem_len"]:  # without memory ours keeps a segment, and 4.37.2 reads the whole text for each token
        assert torch.equal(made_BT[0], expected["greedy_T"])
    own = generate(run, tokens_BT[0, :4], max_new_tokens=17, greedy=True, add_bos_token=False)
    assert made_BT[0, 4:].tolist() == list(own.token_ids)
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").model, run.model)


@pytest.mark.parametrize("has_class", [False, True])
def test_tokenizers_of_old_folders_open(has_class: bool, tmp_path: Path) -> None:
    config, weights, _ = golden("clusters")
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    if has_class:
        values = {"tokenizer_class": "TransfoXLTokenizer", "lower_case": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The , of\nand" if has_class else "the , of\nand"
    assert tokenizer(text)["input_ids"] == [WORDS.index(word) for word in ("the", ",", "of", "<eos>", "and")]
    tokenizer.save_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(text) == tokenizer(text)
    with_bos = AutoTokenizer.from_pretrained(folder, add_bos_token=True, padding_side="right", revision="main")
    assert with_bos(text)["input_ids"] == [WORDS.index("<eos>"), *tokenizer(text)["input_ids"]]
    assert with_bos.padding_side == "right"


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    for change, message in (
        ({"architecture": "gpt"}, "no architecture 'gpt'"),
        ({"architecture": [[]]}, "no architecture"),
        ({"n_layers": "two"}, "n_layers"),
        ({"n_layers": 3}, "is missing, unknown or of another shape"),
        ({"segment_length": 0}, "segment_length"),
        ({"evaluation_memory_length": "x"}, "memory_length"),
        ({"model_type": "gpt2"}, "only 'transfo-xl', 'xlnet' and 'transformer-xl' can be converted"),
    ):
        (tmp_path / "hub" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            convert(tmp_path / "hub", tmp_path / "back")
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("version", "message"), [("", "is not installed; install it: pip install"), ("4.57.1", "4.57.1 is too old")]
)
def test_missing_and_old_transformers_are_named(version: str, message: str) -> None:
    code = (
        "import sys\nfrom importlib import metadata\n"
        "def version(name):\n    if not sys.argv[1]: raise metadata.PackageNotFoundError\n    return sys.argv[1]\n"
        "metadata.version = version\nimport transformer_xl.integrations.huggingface"
    )
    result = python(code, version)
    last = result.stderr.splitlines()[-1]
    assert message in last
    assert re.search(r"pip install '.+\[transformers\]'", last)
