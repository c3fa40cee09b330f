"""datatrove's Ray executor: its tasks give the corpus of one process, and a second run does nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from datatrove.executor import RayPipelineExecutor
from datatrove.pipeline.readers import JsonlReader

from transformer_xl import join_ranks, prepare
from transformer_xl.integrations.datatrove import CorpusTokenizer


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray with two workers on this machine; it writes a token into the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, object_store_memory=2**27)
    yield
    ray.shutdown()


@pytest.mark.client("datatrove")
def test_ray_tasks_give_the_corpus_of_one_process(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    files = [[f"document {number} of file {name}" for number in range(5)] for name in range(7)]
    for name, texts in enumerate(files):
        rows = [json.dumps({"text": text, "split": "train"}) for text in texts]
        (tmp_path / "text" / f"{name}.jsonl").write_text("\n".join(rows))
    pipeline = [JsonlReader(str(tmp_path / "text")), CorpusTokenizer(tmp_path / "ranks", "byte", split_key="split")]
    logs = str(tmp_path / "logs")
    RayPipelineExecutor(pipeline, tasks=4, workers=2, mem_per_cpu_gb=0.5, logging_dir=logs).run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ranks").glob("*/*")}
    RayPipelineExecutor(pipeline, tasks=4, workers=2, mem_per_cpu_gb=0.5, logging_dir=logs).run()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    texts = [text for rank in range(4) for part in files[rank::4] for text in part]
    joined = join_ranks(tmp_path / "ranks", tmp_path / "joined")
    whole = prepare(out=tmp_path / "whole", documents={"train": texts})
    assert joined.record.splits == whole.record.splits
    assert (joined.path / "train-00000.tokens").read_bytes() == (whole.path / "train-00000.tokens").read_bytes()
