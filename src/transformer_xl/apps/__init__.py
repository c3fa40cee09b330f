"""What is built on the core, each with its own command, extra and tests; deleting one breaks nothing else."""
