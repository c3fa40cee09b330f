"""Where text comes from: data sets known by name, downloads, archives, and files of one's own."""
