"""Two implementations of a model on the same inputs: which layers are the same, and the first that differs."""
