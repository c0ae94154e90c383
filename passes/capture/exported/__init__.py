"""What torch.export gives: a graph of ours, without writes."""
