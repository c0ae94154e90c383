"""Finding a plan: a model of few of its layers, the wishes, the search, its record."""
