"""Recomputation: values that the backward makes again instead of keeping them."""
