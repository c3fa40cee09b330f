"""How well a model predicts a text: losses in nats, summed and divided once."""
