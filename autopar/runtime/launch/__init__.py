"""Starting processes, joining them, and telling which of them failed."""
