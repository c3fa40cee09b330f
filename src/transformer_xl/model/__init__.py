"""Language models: Transformer-XL, the paper's baselines, and their memory, attention, softmax, losses and cost."""
