"""From the whole graph to the text that one rank runs of a pipeline stage."""
