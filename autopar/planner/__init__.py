"""Finding a plan: the model sketched, the wishes, the search, its record."""
