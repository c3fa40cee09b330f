"""Settings as dictionaries and keyword arguments; written by tests/config/test_typed_settings.py."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from transformer_xl.config import DynamicConfig, RegularizationConfig

class RegularizationSettings(TypedDict, total=False):
    embedding_dropout: float
    input_dropout: float | None
    output_dropout: float | None
    qkv_dropout: float
    variational_dropout: bool
    activation_penalty: float
    temporal_activation_penalty: float

class ModelSettings(TypedDict, total=False):
    architecture: Literal["transformer-xl", "xlnet", "shaw", "vaswani", "al-rfou", "lstm", "qrnn"]
    vocab_size: int
    n_layers: int
    d_model: int
    dropout: float
    regularization: RegularizationSettings | RegularizationConfig
    d_embed: int | None
    cutoffs: Sequence[int] | Literal["auto"]
    div_val: int
    tie_word_embeddings: bool
    tie_projections: Literal["all", "all_but_first", "none"]
    project_same_width: bool
    max_ngram: int
    ngram_buckets: int
    d_ngram: int
    n_heads: int
    d_head: int | None
    d_ff: int
    attention_dropout: float
    norm_first: bool
    final_norm: bool
    norm_eps: float
    attention_window: int | None
    qk_norm: bool
    clamp_length: int | None
    attn_implementation: str
    attend_empty_memory: bool
    learned_attention_biases: bool
    tie_attention_biases: bool
    tie_key_projections: bool
    value_embeddings: bool
    key_offset: bool
    attention_sinks: bool
    reuse_length: int | None
    perm_size: int
    num_predict: int | None
    mask_alpha: int
    mask_beta: int
    max_gram: int
    functional_tokens: Sequence[int] | Literal["auto"]
    bi_data: bool
    max_relative_positions: int | None
    intermediate_layer_losses: bool
    num_targets: int
    max_position_embeddings: int | None
    qrnn_kernel_size: int
    zoneout: float

class TrainSettings(TypedDict, total=False):
    segment_length: int
    memory_length: int
    extended_context_length: int
    random_segment_lengths: bool
    batch_size: int
    micro_batch_size: int | None
    max_steps: int
    max_epochs: float | None
    optimizer: Literal["adam", "adamw", "muon", "soap-muon"]
    learning_rate: float
    beta1: float
    beta2: float
    muon_learning_rate_ratio: float
    ngram_learning_rate_ratio: float | None
    embedding_learning_rate_ratio: float
    weight_decay: float
    lr_schedule: Literal["cosine", "linear", "wsd"]
    warmup_steps: int
    decay_steps: int
    min_learning_rate_ratio: float
    weight_average: Literal["none", "ema", "uniform"]
    ema_decay: float
    average_start_step: int
    average_learning_rate: float | None
    max_grad_norm: float
    shuffle_documents: bool
    shuffle_length: int
    loss: Literal["full", "half"]
    dtype: Literal["auto", "float32", "bfloat16"]
    compile: Literal["none", "layers", "cudagraphs"]
    activation_checkpointing: bool
    parallelism: Literal["ddp", "fsdp"]
    seed: int
    log_interval: int
    eval_interval: int
    eval_tokens: int | None
    checkpoint_interval: int
    trackers: Sequence[Literal["tensorboard", "wandb", "mlflow", "trackio"]]

class DynamicSettings(TypedDict, total=False):
    optimizer: Literal["rms", "sgd"]
    learning_rate: float | None
    decay: float
    epsilon: float
    gradient_stats_tokens: int

class EvaluationSettings(TypedDict, total=False):
    method: Literal["memory", "sliding-window", "dynamic", "both-sides"]
    segment_length: int | None
    memory_length: int | None
    extended_context_length: int | None
    attention_window: int | None
    clamp_length: int | None
    batch_size: int | None
    warmup_tokens: int | None
    reset_memory: bool
    softmax_temperature: float
    dtype: Literal["auto", "float32", "bfloat16"]
    num_orders: int
    dynamic: DynamicSettings | DynamicConfig

class PrepareSettings(TypedDict, total=False):
    valid_fraction: float
    test_fraction: float
    split_method: Literal["random", "end"]
    seed: int
    include: Sequence[str]
    exclude: Sequence[str]
    encoding: str
    input_format: Literal["text", "csv", "tsv", "jsonl", "json", "parquet", "arrow"] | None
    text_column: str | None
    document_unit: Literal["file", "line"] | None
    vocab_size: int | None
    min_frequency: int
    lowercase: bool
    split_punctuation: bool
    add_eos: bool
    vocab_file: str | None

class GenerationSettings(TypedDict, total=False):
    max_new_tokens: int | None
    min_new_tokens: int
    stop: Sequence[str]
    stop_at_newline: bool
    eos_token_ids: Sequence[int]
    greedy: bool
    temperature: float
    top_k: int | Literal["auto"] | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    repetition_penalty_window: int
    seed: int
    num_samples: int
    prompt_lookup_num_tokens: int | None
    num_beams: int | None
    length_penalty: float
    add_bos_token: bool
    max_prompt_tokens: int | None
    memory_length: int | None
    logprobs: bool
    dtype: Literal["auto", "float32", "bfloat16"]
