"""`txl convert`: convert checkpoints of other programs to runs, and runs to folders for transformers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json, print_table, say_weights
from transformer_xl.files import quoted
from transformer_xl.progress import note


def convert(
    source: Annotated[Path, Parameter(name="FROM")],
    out: Annotated[Path, Parameter(name="TO")],
    /,
    *,
    to: Literal["run", "int8", "huggingface", "huggingface-4.37"] = "run",
    source_format: Literal["huggingface", "official", "nvidia", "tensorflow"] | None = None,
    tokenizer: str | None = None,
    pre_tokenizer: Literal["whitespace", "punctuation", "moses"] | None = None,
    base: Path | None = None,
    eos_token: str | None = None,
    add_bos_token: Annotated[bool, Parameter(negative=())] = False,
    license: str | None = None,
    json: Json = False,
) -> None:
    """Convert a checkpoint of another program to a run, or a run to a folder for transformers. No code is executed.

    An adapter (txl finetune --lora-rank) is merged into the weights of its base.

    Parameters
    ----------
    source
        Checkpoint to convert: a folder of Hugging Face's transformers (TransfoXL or XLNet), model.pt of the authors'
        PyTorch code or its folder, NVIDIA's checkpoint_best.pt or its folder, a TensorFlow checkpoint, or the zip
        archive of XLNet's authors; an adapter, or a run with another --to.
    out
        Folder to create; it must not exist.
    to
        What to write: a run; int8, a run with 8-bit weights; huggingface, for transformers 5 with this package (all
        models), or without it (XLNet); or huggingface-4.37, for transformers 4.37.2 and older (Transformer-XL only).
    source_format
        Format of FROM. [default: detected from the files]
    tokenizer
        Tokenizer of a model that comes without one: a run, a corpus or a txl_tokenizer.json that contains it; byte,
        also for a model whose words are byte values in decimal; or integer for a model whose ids, 0 to V - 1, are all
        there is, such as one of music.
    pre_tokenizer
        How a word tokenizer splits text: moses (as TransfoXLTokenizer), punctuation (punctuation split off, as in
        WikiText), or whitespace (for text that is tokenized already). [default: as in FROM]
    base
        Folder of the base of an adapter. [default: where it was]
    eos_token
        Token that ends a text, for --to huggingface: a word, or the text of a token; \\n is the newline. [default:
        <|endoftext|> of a tokenizer that has it, else none]
    add_bos_token
        Begin each text with the beginning-of-sequence token, for --to huggingface: programs then score its first token
        too, as 'txl minimal-pairs' does.
    license
        Identifier of the model's licence on the Hub, such as apache-2.0, for the model card (README.md) of --to
        huggingface. [default: the card says that none was given]
    """
    from transformer_xl.integrations.checkpoints import convert as checkpoints

    start = time.perf_counter()
    result = checkpoints.convert(
        source,
        out,
        to=to,
        source_format=source_format,
        tokenizer=tokenizer,
        pre_tokenizer=pre_tokenizer,
        base=base,
        eos_token=None if eos_token is None else eos_token.replace("\\n", "\n"),
        add_bos_token=add_bos_token,
        license=license,
    )
    seconds = time.perf_counter() - start
    say_weights(result.weights)
    for text in result.notes:
        note(text)
    fields: dict[str, Any] = {
        "format": result.format,
        "parameters": result.parameters,
        "tokenizer": f"{result.tokenizer.kind}, {result.tokenizer.vocab_size:,} tokens",
        **({} if result.readers is None else {"readers": result.readers}),
    }
    if json:
        weights = result.weights.as_dict() if result.weights else {}
        print_json(
            {"from": str(source), "to": str(out), **weights, **fields, "notes": list(result.notes), "seconds": seconds}
        )
        return
    rows = [[name, f"{value:,}" if isinstance(value, int) else str(value)] for name, value in fields.items()]
    print_table(f"{out} ({seconds:.1f} s)", ["", "value"], rows)
    if to in ("run", "int8"):
        prepare = f"txl prepare FILES --tokenizer {quoted(out)} --out CORPUS"
        print(f"next: {prepare}, txl evaluate {quoted(out)} --corpus CORPUS")
