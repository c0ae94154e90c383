"""Names the dims of all tensors, by how dims flow through ops."""
