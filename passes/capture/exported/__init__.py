"""Reads torch.export's program as a graph of ours, without writes."""
