"""Writing text: choosing the next token, one after another, with memory."""
