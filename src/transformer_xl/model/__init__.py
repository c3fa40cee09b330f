"""The model: memory as a value, relative attention, and the contract every language model here keeps."""
