"""The version that plans, checkpoints and compiled code are of."""

VERSION = "0.1.0"
