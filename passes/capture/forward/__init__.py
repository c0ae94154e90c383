"""A forward that is captured, while it runs: what it asks, calls and keeps."""
