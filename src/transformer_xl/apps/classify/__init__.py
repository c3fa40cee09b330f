"""Vectors of documents, and classifiers of documents of any length, with their commands."""
