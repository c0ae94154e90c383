"""Shards a graph: the dims that each axis splits, and the collectives that follow."""
