"""Runs side by side: `txl runs` (a table), `txl runs compare` (settings, curves, losses on one text), `txl plot`."""
