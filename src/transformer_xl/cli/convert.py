"""`txl convert`: convert checkpoints of other programs to runs, and runs to the Hugging Face layout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.progress import say


def convert(
    source: Annotated[Path, Parameter(name="FROM")],
    out: Annotated[Path, Parameter(name="TO")],
    /,
    *,
    to: Literal["run", "huggingface"] = "run",
    source_format: Literal["huggingface", "official", "nvidia", "tensorflow"] | None = None,
    tokenizer: str | None = None,
    pre_tokenizer: Literal["whitespace", "punctuation", "moses"] | None = None,
    json: Json = False,
) -> None:
    """Convert a checkpoint of another program to a run, or a run to the Hugging Face layout; nothing in it is executed.

    Parameters
    ----------
    source
        What to read: a Hugging Face folder (transfo-xl), model.pt of the authors' PyTorch code or its folder, NVIDIA's
        checkpoint_best.pt or its folder, a TensorFlow checkpoint; with --to huggingface, a run.
    out
        Folder to make; it must not exist.
    to
        What to write.
    source_format
        Format of FROM. [default: told from the files]
    tokenizer
        For a model that comes without a tokenizer: a run, a corpus or a txl_tokenizer.json that has it; or byte.
    pre_tokenizer
        How a word tokenizer splits text: as Hugging Face's tokenizer does (moses), punctuation apart as in WikiText, or
        at white space alone, for text that is tokenized already. [default: as FROM had it]
    """
    from transformer_xl.interop import convert as interop

    began = time.perf_counter()
    result = interop.convert(
        source, out, to=to, source_format=source_format, tokenizer=tokenizer, pre_tokenizer=pre_tokenizer
    )
    seconds = time.perf_counter() - began
    for remark in result.remarks:
        say(f"note: {remark}")
    words = f"{result.tokenizer.kind}, {result.tokenizer.vocab_size:,} tokens"
    facts: dict[str, Any] = {"format": result.format, "parameters": result.parameters, "tokenizer": words}
    if json:
        remarks = list(result.remarks)
        print_json({"from": str(source), "to": str(out), **facts, "remarks": remarks, "seconds": seconds})
        return
    facts["parameters"] = f"{result.parameters:,}"
    print_table(f"{out} ({seconds:.1f} s)", ["", "value"], [[name, str(value)] for name, value in facts.items()])
    if to == "run":
        print(f"next: txl prepare FILES --tokenizer {out} --out CORPUS, txl evaluate {out} --corpus CORPUS")
