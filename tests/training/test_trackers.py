"""Trackers get each line of metrics once, whatever stops a run; what they do or fail to do changes no training.

The tests with wandb, mlflow and trackio need those packages, which `make setup` does not install.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from training_runs import MODEL, OPTIONS, TRAIN, StopAt, letters_corpus
from typing_extensions import override

from transformer_xl import Callback, UserError, resume, train
from transformer_xl.config import check_settings, run_settings
from transformer_xl.config.train_config import TrainConfig
from transformer_xl.run_folder import RunFolder
from transformer_xl.training import trackers
from transformer_xl.training.trackers import Tracker

SHORT = {**TRAIN, "max_steps": 12, "eval_interval": 5, "checkpoint_interval": 4, "trackers": ("wandb",)}
MODEL_WITH_DROPOUT = {**MODEL, "dropout": 0.2}
SAME = "model.safetensors", "checkpoints/step-00000012/model.safetensors"


class Recorder(Tracker):
    """Keeps what it gets, by the id of the run; fails in the methods that are named in FAILS."""

    RUNS: ClassVar[dict[str, dict[str, Any]]] = {}
    FAILS: ClassVar[set[str]] = set()

    def __init__(self, package: str) -> None:
        self.check("import")

    def check(self, method: str) -> None:
        if method in self.FAILS:
            raise OSError(28, "No space left on device")

    @override
    def begin(self, folder: RunFolder, run_id: str | None, step: int) -> str:
        self.check("begin")
        name = run_id or f"run {len(self.RUNS)}"
        self.run = self.RUNS.setdefault(name, {"lines": [], "ends": [], "config": folder.config})
        return name

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        self.check("log")
        self.run["lines"].append({"step": step, **values})

    @override
    def report(self, values: Mapping[str, Any], sample: str) -> None:
        self.check("report")
        self.run |= {"report": values, "sample": sample}

    @override
    def end(self, *, finished: bool) -> None:
        self.check("end")
        self.run["ends"].append(finished)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    monkeypatch.setattr(Recorder, "RUNS", {})
    monkeypatch.setattr(Recorder, "FAILS", set())
    return Recorder


class Warnings(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    @override
    def on_warning(self, trainer: Any, message: str) -> None:
        self.messages.append(message)


class Killed(Callback):
    """Ends training in a step, as if the process was killed there."""

    def __init__(self, step: int) -> None:
        self.step = step

    @override
    def on_step(self, trainer: Any, num_tokens: int) -> None:
        if trainer.state.step == self.step:
            raise ZeroDivisionError


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without a tracker, beside its corpus."""
    folder, settings = tmp_path_factory.mktemp("plain"), {**SHORT, "trackers": ()}
    corpus = letters_corpus(folder / "corpus")
    return train(None, corpus, folder / "plain", model=MODEL_WITH_DROPOUT, train=settings, **OPTIONS).path


def expected_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as trackers get them."""
    found = []
    for line in RunFolder.open(run).metrics():
        split, step = line.pop("split"), line.pop("step")
        found.append({"step": step, **{f"{split}/{name}": value for name, value in line.items()}})
    return found


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines without times, which a step that is trained again has anew."""
    times = ("seconds", "tokens_per_second")
    kept = [{name: value for name, value in line.items() if not name.endswith(times)} for line in lines]
    return sorted(kept, key=lambda line: (line["step"], *line))


def test_stopped_killed_and_resumed_run_is_in_one_place_and_equals_a_plain_one(
    tmp_path: Path, plain: Path, recorder: type[Recorder]
) -> None:
    corpus, run = plain.parent / "corpus", tmp_path / "run"
    stopped = train(None, corpus, run, model=MODEL_WITH_DROPOUT, train=SHORT, callbacks=[StopAt(4)], **OPTIONS)
    assert not stopped.finished
    for step in (11, 10):  # the second time, less is trained than was sent already
        with pytest.raises(ZeroDivisionError):
            resume(run, callbacks=[Killed(step)], **OPTIONS)
    result = resume(run, **OPTIONS)
    assert [(run / name).read_bytes() for name in SAME] == [(plain / name).read_bytes() for name in SAME]
    (sent,) = recorder.RUNS.values()
    assert without_times(sent["lines"]) == without_times(expected_lines(run))
    assert {(line["step"], "valid/nats_per_token" in line) for line in sent["lines"]} >= {(10, True), (12, False)}
    assert sent["ends"] == [False, False, False, True]
    assert sent["report"]["step"] == 12
    assert sent["report"]["best_nats_per_token"] == result.best_nats_per_token
    assert len(sent["sample"]) > 50
    assert result.history == RunFolder.open(run).metrics()


def test_going_back_with_other_settings_sends_the_new_lines(
    tmp_path: Path, plain: Path, recorder: type[Recorder]
) -> None:
    run = tmp_path / "run"
    train(None, plain.parent / "corpus", run, model=MODEL, train=SHORT, **OPTIONS)
    resume(run, from_step=8, train={"learning_rate": 0.002}, **OPTIONS)
    (sent,) = recorder.RUNS.values()
    assert without_times(sent["lines"][-6:]) == without_times(expected_lines(run)[-6:])
    assert len(sent["lines"]) == 12 + 3 + 6
    resume(run, from_step=8, **OPTIONS)  # with the settings before the change
    assert without_times(sent["lines"][-6:]) == without_times(expected_lines(run)[-6:])
    assert len(sent["lines"]) == 12 + 3 + 6 + 6


def test_tracker_of_a_later_start_gets_the_earlier_lines(tmp_path: Path, plain: Path, recorder: type[Recorder]) -> None:
    run = shutil.copytree(plain, tmp_path / "run")
    resume(run, train={"trackers": ("wandb",), "max_steps": 13}, **OPTIONS)
    (sent,) = recorder.RUNS.values()
    assert sent["lines"] == expected_lines(run)


@pytest.mark.parametrize("method", ["import", "begin", "log", "report", "end"])
def test_failing_tracker_is_dropped_with_one_warning(
    tmp_path: Path, plain: Path, recorder: type[Recorder], method: str
) -> None:
    recorder.FAILS.add(method)
    warnings = Warnings()
    options = {**OPTIONS, "callbacks": [warnings]}
    corpus = plain.parent / "corpus"
    run = train(None, corpus, tmp_path / "run", model=MODEL_WITH_DROPOUT, train=SHORT, **options).path
    assert [(run / name).read_bytes() for name in SAME] == [(plain / name).read_bytes() for name in SAME]
    (message,) = warnings.messages
    assert message.startswith("wandb gets nothing more until the run is resumed, training goes on: OSError")
    if method != "log":
        return
    recorder.FAILS.clear()
    resume(run, train={"max_steps": 13}, **OPTIONS)  # what failed is made up for
    (sent,) = recorder.RUNS.values()
    assert without_times(sent["lines"]) == without_times(expected_lines(run))


def test_missing_package_is_refused_before_the_run_exists(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    corpus = plain.parent / "corpus"
    with pytest.raises(UserError, match=r"train.trackers wandb needs a package .*pip install .*\[wandb\]'"):
        train(None, corpus, tmp_path / "run", model=MODEL, train=SHORT, **OPTIONS)
    assert not (tmp_path / "run").exists()


def test_tensorboard_switch_of_earlier_versions_is_read() -> None:
    for given, names in (
        ({"tensorboard": True}, ("tensorboard",)),
        ({"tensorboard": False}, ()),
        ({"tensorboard": False, "trackers": ["tensorboard", "wandb"]}, ("wandb",)),
        ({"trackers": "wandb, mlflow"}, ("wandb", "mlflow")),
    ):
        assert check_settings(TrainConfig, given).trackers == names
    change = {"step": 4, "before": {"tensorboard": False}, "after": {"tensorboard": True}}
    config = run_settings({"train": {"tensorboard": True}, "history": [change]}, "test")
    assert config.before_last_change().train == TrainConfig()
    with pytest.raises(UserError, match=r"no tracker 'wandbb' \(did you mean 'wandb'\?\)"):
        TrainConfig(trackers=("wandbb",))  # pyrefly: ignore


def steps_in_tensorboard(run: Path, run_id: str) -> dict[str, list[int]]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(run / run_id), size_guidance={"tensors": 0})
    events.Reload()
    assert {"config/text_summary", "report/text_summary", "sample/text_summary"} <= set(events.Tags()["tensors"])
    return {split: [one.step for one in events.Scalars(f"{split}/nats_per_token")] for split in ("train", "valid")}


def steps_in_wandb(run: Path, run_id: str) -> dict[str, list[int]]:
    """Return the steps in the files of offline runs, which are logs as of LevelDB with records of protobuf."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: dict[str, list[int]] = {"train": [], "valid": []}
    summary: set[str] = set()
    for file in sorted(run.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        data, start, part = file.read_bytes(), 7, b""
        while start + 7 <= len(data):
            if 32768 - start % 32768 < 7:
                start += 32768 - start % 32768
            length, kind = int.from_bytes(data[start + 4 : start + 6], "little"), data[start + 6]
            part += data[start + 7 : start + 7 + length]
            start += 7 + length
            if kind not in (1, 4):  # a record goes on in the next block
                continue
            record, part = proto.Record.FromString(part), b""
            values = {(one.key or ".".join(one.nested_key)): one.value_json for one in record.history.item}
            for split, steps in found.items():
                steps += [int(values["step"])] if f"{split}/nats_per_token" in values else []
            summary |= {one.key or ".".join(one.nested_key) for one in record.summary.update}
    assert summary >= {"report/step", "sample"}
    return found


def steps_in_mlflow(run: Path, run_id: str) -> dict[str, list[int]]:
    client = pytest.importorskip("mlflow").MlflowClient()
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params["train.batch_size"] == "3"
    assert {file.path for file in client.list_artifacts(run_id)} == {"config.yaml", "report.json", "sample.txt"}
    names = {split: f"{split}/nats_per_token" for split in ("train", "valid")}
    return {split: [one.step for one in client.get_metric_history(run_id, name)] for split, name in names.items()}


def steps_in_trackio(run: Path, run_id: str) -> dict[str, list[int]]:
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyrefly: ignore

    (found,) = [one for one in trackio.Api().runs("transformer-xl") if one.name == run_id]
    assert found.config["train.batch_size"] == 3
    lines = SQLiteStorage.get_logs("transformer-xl", run_id)
    assert [line["report/step"] for line in lines if "sample" in line] == [12]
    names = {split: f"{split}/nats_per_token" for split in ("train", "valid")}
    return {split: [line["step"] for line in lines if name in line] for split, name in names.items()}


READERS = {
    "tensorboard": steps_in_tensorboard,
    "wandb": steps_in_wandb,
    "mlflow": steps_in_mlflow,
    "trackio": steps_in_trackio,
}


@pytest.mark.filterwarnings("default")  # of the packages
@pytest.mark.parametrize("name", READERS)
def test_package_has_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    settings = {**SHORT, "trackers": (name,)}
    options = {**OPTIONS, "callbacks": [StopAt(5)]}
    run = train(None, letters_corpus(tmp_path / "corpus"), "run", model=MODEL, train=settings, **options).path
    run_id = json.loads((run / "trackers.json").read_text())[name]["id"]
    resume(run, **OPTIONS)
    assert json.loads((run / "trackers.json").read_text())[name] == {
        "id": run_id,
        "train": 12,
        "valid": 12,
        "changes": [],
    }
    assert READERS[name](run, run_id) == {"train": list(range(1, 13)), "valid": [5, 10, 12]}
