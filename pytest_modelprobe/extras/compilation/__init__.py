"""What `torch.compile` and `torch.export` make of a model: whether it is the same, and where the graph breaks."""
