"""A model that is ready to read and to generate: its weights are fixed, converted and packed once."""

from transformer_xl.inference.inference_model import (
    InferenceModel,
    TokenModel,
    prepare_inference,
    require_reading_memory,
)

__all__ = ["InferenceModel", "TokenModel", "prepare_inference", "require_reading_memory"]
