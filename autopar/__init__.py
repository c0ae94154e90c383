"""autopar: parallel training of an unmodified PyTorch model."""
