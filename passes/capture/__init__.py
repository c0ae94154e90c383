"""Reading a model: its forward as one graph, in one spelling."""
