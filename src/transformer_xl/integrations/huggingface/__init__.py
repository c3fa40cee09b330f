"""Transformer-XL in transformers 5: importing this module registers configuration, model and tokenizer.

    import transformer_xl.integrations.huggingface
    model = AutoModelForCausalLM.from_pretrained(DIR)          a folder that `txl convert RUN DIR --to huggingface` made
    model, tokenizer = from_run(RUN)                           a run itself

Folders with the old model type `transfo-xl`, as on the Hub, open as well.

Raises:
    UserError: transformers is missing or too old.
"""

from __future__ import annotations

from importlib import metadata

from transformer_xl.config import UserError
from transformer_xl.config.extras import install_command, missing_extra


def _check_version() -> None:
    """Check that transformers 5 is installed, without importing it.

    Raises:
        UserError: it is missing or older.
    """
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise missing_extra("transformers", "transformers") from None
    if int(version.split(".")[0]) < 5:
        raise UserError(
            f"transformers {version} is too old, 5 is needed; {install_command('transformers')} (for transformers 4.37 "
            "and older: txl convert RUN DIR --to huggingface-4.37)"
        )


_check_version()

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from transformer_xl.integrations.huggingface.cache import MemoryCache  # noqa: E402
from transformer_xl.integrations.huggingface.configuration import (  # noqa: E402
    PretrainedTransformerXLConfig,
    TransfoXLConfig,
)
from transformer_xl.integrations.huggingface.modeling import TransformerXLForCausalLM, from_run  # noqa: E402
from transformer_xl.integrations.huggingface.tokenization import (  # noqa: E402
    TransformerXLTokenizer,
    TransformerXLTokenizersBackend,
    TransfoXLTokenizer,
)

# registering them again changes nothing
for config_class in (PretrainedTransformerXLConfig, TransfoXLConfig):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
# an old folder's tokenizer_config.json names its class
AutoTokenizer.register(TransfoXLConfig, TransfoXLTokenizer, exist_ok=True)
for tokenizer_class in (TransformerXLTokenizersBackend, TransformerXLTokenizer):  # the last without a name in a folder
    AutoTokenizer.register(PretrainedTransformerXLConfig, tokenizer_class, exist_ok=True)
AutoModelForCausalLM.register(PretrainedTransformerXLConfig, TransformerXLForCausalLM, exist_ok=True)
# Trainer's label smoothing shifts the labels of the models named there only
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PretrainedTransformerXLConfig.model_type] = TransformerXLForCausalLM.__name__

__all__ = [
    "MemoryCache",
    "PretrainedTransformerXLConfig",
    "TransfoXLConfig",
    "TransfoXLTokenizer",
    "TransformerXLForCausalLM",
    "TransformerXLTokenizer",
    "TransformerXLTokenizersBackend",
    "from_run",
]
