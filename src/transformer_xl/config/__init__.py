"""All settings, with units and checks; the recipes; and UserError, the error that users can correct.

Settings come from three places, later ones taking precedence: the defaults here, a recipe (a YAML file, see
`recipes/`), and flags such as `--model.n-layers 6`. They are checked once, as a whole, and never changed afterwards;
`config.yaml` of a run stores all of them. (`name as name` makes an imported name public for type checkers.)
"""

from transformer_xl.config.evaluation_config import (
    WITH_PLAIN_WEIGHTS as WITH_PLAIN_WEIGHTS,
    WITHOUT_MEMORY as WITHOUT_MEMORY,
    DynamicConfig as DynamicConfig,
    EvaluationConfig as EvaluationConfig,
    EvaluationMethod as EvaluationMethod,
)
from transformer_xl.config.model_config import (
    ARCHITECTURES as ARCHITECTURES,
    AbsoluteConfig as AbsoluteConfig,
    AlRfouConfig as AlRfouConfig,
    BackboneConfig as BackboneConfig,
    BaseModelConfig as BaseModelConfig,
    LayerConfig as LayerConfig,
    LSTMConfig as LSTMConfig,
    ModelConfig as ModelConfig,
    QRNNConfig as QRNNConfig,
    RegularizationConfig as RegularizationConfig,
    grouped as grouped,
    RecurrentConfig as RecurrentConfig,
    RelativeConfig as RelativeConfig,
    RelativeLayerConfig as RelativeLayerConfig,
    ShawConfig as ShawConfig,
    TransformerConfig as TransformerConfig,
    TransformerXLConfig as TransformerXLConfig,
    VaswaniConfig as VaswaniConfig,
    XLNetConfig as XLNetConfig,
)
from transformer_xl.config.other_names import OTHER_NAMES as OTHER_NAMES
from transformer_xl.config.run_config import (
    DEFAULT_RECIPE as DEFAULT_RECIPE,
    FinetuneConfig as FinetuneConfig,
    LoraConfig as LoraConfig,
    Recipe as Recipe,
    RunConfig as RunConfig,
    checked_names as checked_names,
    given_settings as given_settings,
    load_recipe as load_recipe,
    merge_recipe as merge_recipe,
    recipe_names as recipe_names,
    recipe_text as recipe_text,
    refuse_unused as refuse_unused,
    run_settings as run_settings,
)
from transformer_xl.config.settings import (
    INT32_MAX as INT32_MAX,
    Settings as Settings,
    UserError as UserError,
    check_overrides as check_overrides,
    check_settings as check_settings,
    check_type as check_type,
    explain as explain,
    flatten as flatten,
    merge as merge,
    nearest as nearest,
    read_yaml as read_yaml,
    whole_number as whole_number,
)
from transformer_xl.config.train_config import TrainConfig as TrainConfig
