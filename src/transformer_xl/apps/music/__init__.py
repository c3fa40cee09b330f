"""MIDI files as corpora, and generated music (extra `music`)."""
