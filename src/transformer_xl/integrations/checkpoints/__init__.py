"""Import and export of other programs' checkpoints; start reading at convert.py."""
