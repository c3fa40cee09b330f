"""Transformer-XL in transformers 5: importing this module registers configuration, models and tokenizer.

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

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.models.auto import modeling_auto  # noqa: E402

from transformer_xl.integrations.huggingface.base_model import TransformerXLModel  # noqa: E402
from transformer_xl.integrations.huggingface.cache import MemoryCache  # noqa: E402
from transformer_xl.integrations.huggingface.classification import (  # noqa: E402
    TransformerXLForSequenceClassification,
    TransformerXLForTokenClassification,
)
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
for auto_class, model_class, task in (
    (AutoModel, TransformerXLModel, "MODEL"),
    (AutoModelForCausalLM, TransformerXLForCausalLM, "MODEL_FOR_CAUSAL_LM"),
    (AutoModelForSequenceClassification, TransformerXLForSequenceClassification, "MODEL_FOR_SEQUENCE_CLASSIFICATION"),
    (AutoModelForTokenClassification, TransformerXLForTokenClassification, "MODEL_FOR_TOKEN_CLASSIFICATION"),
):
    auto_class.register(PretrainedTransformerXLConfig, model_class, exist_ok=True)
    # Trainer's label smoothing and the pipelines look there for the names of classes
    names = getattr(modeling_auto, f"{task}_MAPPING_NAMES")
    names[PretrainedTransformerXLConfig.model_type] = model_class.__name__

__all__ = [
    "MemoryCache",
    "PretrainedTransformerXLConfig",
    "TransfoXLConfig",
    "TransfoXLTokenizer",
    "TransformerXLForCausalLM",
    "TransformerXLForSequenceClassification",
    "TransformerXLForTokenClassification",
    "TransformerXLModel",
    "TransformerXLTokenizer",
    "TransformerXLTokenizersBackend",
    "from_run",
]
