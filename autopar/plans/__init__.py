"""Plans on disk: decisions, what a search found, compiled programs."""
