"""Communication of ranks: collectives, messages, and their carriers."""
