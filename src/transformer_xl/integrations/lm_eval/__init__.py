"""lm-evaluation-harness (lm_eval) with runs of this package as its model `txl`.

python -m transformer_xl.integrations.lm_eval --model txl --model_args run=runs/mine --tasks lambada_openai
"""
