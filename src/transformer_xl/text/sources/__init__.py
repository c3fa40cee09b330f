"""Where text comes from: named data sets, downloads, archives, and the user's own files."""
