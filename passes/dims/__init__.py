"""What each dim of each tensor is, found by how dims flow through ops."""
