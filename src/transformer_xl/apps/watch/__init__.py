"""Read a text as it is written, and print the lines that surprise a run."""
