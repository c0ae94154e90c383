"""What a run is trained on: files, as tokens, as the batches of its steps."""
