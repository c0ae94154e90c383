"""The commands of `autopar`."""
