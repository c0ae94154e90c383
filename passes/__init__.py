"""The pure compiler: types, and passes that are functions from one to another."""
