"""Settings with their units and checks, the recipes, and the error that users see.

Settings come from three places, later ones taking precedence: the defaults here, a recipe (a YAML file, see
`recipes/`), and flags such as `--model.n-layers 6`. They are checked once, as a whole, and never changed afterwards;
`config.yaml` of a run stores all of them.
"""

from transformer_xl.config.evaluation import DynamicConfig, EvaluationConfig
from transformer_xl.config.model import (
    ARCHITECTURES,
    AbsoluteConfig,
    AlRfouConfig,
    BaseModelConfig,
    LSTMConfig,
    ModelConfig,
    QRNNConfig,
    RecurrentConfig,
    RelativeConfig,
    ShawConfig,
    TransformerConfig,
    TransformerXLConfig,
    VaswaniConfig,
)
from transformer_xl.config.run import (
    CorpusReference,
    Recipe,
    RunConfig,
    load_recipe,
    merge_recipe,
    recipe_names,
    run_settings,
)
from transformer_xl.config.settings import (
    INT32_MAX,
    Settings,
    UserError,
    check_settings,
    explain,
    merge,
    nearest,
    read_yaml,
)
from transformer_xl.config.train import TrainConfig

__all__ = [
    "ARCHITECTURES",
    "INT32_MAX",
    "AbsoluteConfig",
    "AlRfouConfig",
    "BaseModelConfig",
    "CorpusReference",
    "DynamicConfig",
    "EvaluationConfig",
    "LSTMConfig",
    "ModelConfig",
    "QRNNConfig",
    "Recipe",
    "RecurrentConfig",
    "RelativeConfig",
    "RunConfig",
    "Settings",
    "ShawConfig",
    "TrainConfig",
    "TransformerConfig",
    "TransformerXLConfig",
    "UserError",
    "VaswaniConfig",
    "check_settings",
    "explain",
    "load_recipe",
    "merge",
    "merge_recipe",
    "nearest",
    "read_yaml",
    "recipe_names",
    "run_settings",
]
