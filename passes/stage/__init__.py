"""Makes what one rank runs of a pipeline stage, from the whole graph."""
