"""Explaining a model: pictures and pages."""
