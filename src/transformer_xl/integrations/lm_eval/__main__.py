"""The command line of lm_eval, which also knows the model `txl`.

lm_eval 0.4.13 finds no models in other packages; later versions do (entry point group `lm_eval.models`), and then this
is the same as `lm_eval`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra


def main() -> int:
    """Run lm_eval with the arguments of this process; return 2 after an error that the user can correct."""
    try:
        if find_spec("lm_eval") is None:
            raise missing_extra("lm_eval", "lm-eval")
        from lm_eval.__main__ import cli_evaluate

        from transformer_xl.integrations.lm_eval.model import TxlLM

        assert TxlLM  # importing it has registered it
        if find_spec("transformers") is not None:
            import_module("transformer_xl.integrations.huggingface")  # so that the model hf opens folders of ours
        cli_evaluate()
    except UserError as error:
        print(f"lm-eval: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
