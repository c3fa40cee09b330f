"""Agents with memory in TorchRL (extra `rl`)."""
