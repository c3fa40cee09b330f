"""Text generation: read a prompt into memory, then sample one token after another, or search with beams."""
