"""Make a corpus of JSON lines in many processes: near-duplicates removed by MinHash, languages filtered, tokenized.

    pip install '.[datatrove]' spacy
    python examples/datatrove_corpus.py texts/ work/ --tasks 4 --workers 2
    txl join work/ranks --out corpora/mine

Each row has its text in `text` and, if it has one, its id in `id`. A second start runs what is not complete. With
`--executor slurm` each stage is a job array, with `--executor ray` tasks of the Ray cluster that RAY_ADDRESS names, or
of this machine without it. `--languages en de` needs fasttext-numpy2-wheel and fasteners, and downloads a model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import LanguageFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.hashing import HashConfig

from transformer_xl.integrations.datatrove import CorpusTokenizer

EXECUTORS = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}


def stages(arguments: argparse.Namespace) -> dict[str, tuple[int, list[Any]]]:
    """Return the stages by name, each with its number of tasks and its pipeline."""
    work, tasks = arguments.work.absolute(), arguments.tasks
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))  # the default needs xxhash below 4
    folder = {name: str(work / "minhash" / name) for name in ("signatures", "buckets", "removed")}
    # both readers must give the same documents in the same order
    reader = JsonlReader(str(arguments.texts.absolute()), glob_pattern="*.jsonl*")
    languages = [LanguageFilter(arguments.languages)] if arguments.languages else []
    corpus = CorpusTokenizer(work / "ranks", arguments.tokenizer, valid_fraction=arguments.valid_fraction)
    return {
        "signatures": (tasks, [reader, MinhashDedupSignature(folder["signatures"], config)]),
        "buckets": (config.num_buckets, [MinhashDedupBuckets(folder["signatures"], folder["buckets"], config=config)]),
        "clusters": (1, [MinhashDedupCluster(folder["buckets"], folder["removed"], config=config)]),
        "corpus": (tasks, [reader, MinhashDedupFilter(folder["removed"]), *languages, corpus]),
    }


def main(arguments: argparse.Namespace) -> None:
    """Run the stages, each after the one before."""
    options: dict[str, Any] = {"workers": arguments.workers}
    if arguments.executor == "slurm":
        options |= {"time": arguments.time, "partition": arguments.partition, "qos": "", "mem_per_cpu_gb": 1}
    if arguments.executor == "ray":
        import ray

        ray.init()
        options["mem_per_cpu_gb"] = 1
    executor = None
    for name, (tasks, pipeline) in stages(arguments).items():
        logs = str(arguments.work.absolute() / "logs" / name)
        kind = EXECUTORS[arguments.executor]
        executor = kind(pipeline, tasks=tasks, logging_dir=logs, depends=executor, **options)
    assert executor is not None
    executor.run()  # runs those that it depends on first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder of JSON lines, also .gz and .zst")
    parser.add_argument("work", type=Path, help="folder for what the tasks write")
    parser.add_argument("--tokenizer", default="byte", help="byte, or the path of a trained one")
    parser.add_argument("--valid-fraction", type=float, default=0.05)
    parser.add_argument("--languages", nargs="*", help="such as en de; the default keeps all")
    parser.add_argument("--executor", choices=EXECUTORS, default="local")
    parser.add_argument("--tasks", type=int, default=4, help="parts of the text, and ranks of the corpus")
    parser.add_argument("--workers", type=int, default=2, help="tasks at a time")
    parser.add_argument("--partition", default="main", help="of Slurm")
    parser.add_argument("--time", default="01:00:00", help="limit of Slurm for each task")
    main(parser.parse_args())
