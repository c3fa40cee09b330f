"""The command `txl`: a thin verb per file, imported only when used."""
