"""How well a model predicts a text: nats summed in text order, divided once."""
