"""Models by name or by the function that makes them, and batches for them."""
