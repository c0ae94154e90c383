"""What the backward makes again instead of keeping it."""
