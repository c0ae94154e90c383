"""Which axis splits what, where, and the collectives that follow from it."""
