"""The command line `txl`: one module for each command, imported only when that command runs."""
