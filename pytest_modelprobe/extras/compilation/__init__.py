"""What `torch.compile` makes of a model: where the graph breaks, and what is compiled again."""
