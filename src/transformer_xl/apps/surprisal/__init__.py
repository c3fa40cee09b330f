"""Surprisal by word, as psycholinguists use it, with its plot and command."""
