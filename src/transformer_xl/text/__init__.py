"""Text on its way to the model: where it comes from, its vocabulary, its tokens on disk, its segments in order."""
