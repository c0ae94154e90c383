"""What a rank runs of a stage, as the text of a Python module."""
