"""The command line of lm_eval, which also knows the model `txl`.

lm_eval 0.4.13 finds no models in other packages; later versions do (entry point group `lm_eval.models`), and then this
is the same as `lm_eval`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from transformer_xl.config import UserError


def with_batch_size(arguments: list[str]) -> list[str]:
    """Return the arguments with `--batch_size auto` in front, where none is given.

    lm_eval's default is one request at a time, which is slow, and here no result depends on the batch size.
    """
    is_run = arguments[:1] == ["run"]
    options = {word.partition("=")[0] for word in arguments}
    if not options & {"--tasks", "-t"} or options & {"--batch_size", "-b", "--config", "-C"}:
        return arguments
    if not is_run and not arguments[0].startswith("-"):  # another command, such as validate
        return arguments
    return [*arguments[:is_run], "--batch_size", "auto", *arguments[is_run:]]


def main() -> int:
    """Run lm_eval with the arguments of this process; return 2 after an error that the user can correct."""
    try:
        if find_spec("lm_eval") is None:
            raise UserError("lm_eval is not installed; install it: pip install 'transformer-xl[lm-eval]'")
        from lm_eval.__main__ import cli_evaluate

        from transformer_xl.integrations.lm_eval.model import TxlLM

        assert TxlLM  # importing it has registered it
        if "hf" in sys.argv and find_spec("transformers") is not None:
            import_module("transformer_xl.integrations.huggingface")  # so that the model hf opens folders of ours
        sys.argv[1:] = with_batch_size(sys.argv[1:])
        cli_evaluate()
    except UserError as error:
        print(f"lm-eval: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
