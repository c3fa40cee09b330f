"""`txl convert`: a model of another program becomes a run, or a run a folder for Hugging Face."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError
from transformer_xl.progress import say


def convert(
    source: Annotated[Path, Parameter(name="FROM")],
    out: Annotated[Path, Parameter(name="TO")],
    /,
    *,
    to: Literal["run", "huggingface"] = "run",
    format: Literal["huggingface", "official", "nvidia", "tensorflow"] | None = None,
    tokenizer: str | None = None,
    splitting: Literal["whitespace", "punctuation", "moses"] | None = None,
    json: Json = False,
) -> None:
    """Make a run of another program's model, or write a run for Hugging Face; nothing in a checkpoint is executed.

    Parameters
    ----------
    source
        What to read: a Hugging Face folder (transfo-xl), model.pt of the authors' PyTorch code or its folder, NVIDIA's
        checkpoint_best.pt or its folder, a TensorFlow checkpoint; with --to huggingface, a run.
    out
        Folder to make; it must not exist.
    to
        What to make of it.
    format
        What FROM is. [default: recognised]
    vocabulary
        For a model that comes without its vocabulary: a run, a corpus or a txl_tokenizer.json that has it; or byte.
    splitting
        How text becomes the words of the vocabulary: as Hugging Face's tokenizer splits it, as English in WikiText's
        forms, or at white space alone, for text that is split already. [default: as FROM had it]
    """
    from transformer_xl.interop.convert import to_huggingface, to_run

    began = time.perf_counter()
    if to == "huggingface":
        if any(given is not None for given in (format, tokenizer, splitting)):
            raise UserError("--format, --vocabulary and --splitting are for models of other programs; leave them out")
        done = to_huggingface(source, out)
    else:
        done = to_run(source, out, format=format, tokenizer=tokenizer, splitting=splitting)
    for remark in done.remarks:
        say(f"note: {remark}")
    words = f"{done.tokenizer.kind}, {done.tokenizer.vocab_size:,} tokens"
    seconds = time.perf_counter() - began
    if json:
        facts = {"from": str(source), "to": str(out), "format": done.format, "parameters": done.parameters}
        print_json({**facts, "tokenizer": words, "remarks": list(done.remarks), "seconds": seconds})
        return
    rows = [["format", done.format], ["parameters", f"{done.parameters:,}"], ["vocabulary", words]]
    print_table(f"{out} ({seconds:.1f} s)", ["", "value"], rows)
    if to == "run":
        print(f"next: txl prepare FILES --vocabulary {out} --out CORPUS, txl evaluate {out} --corpus CORPUS")
