"""A model after a change that keeps its function; adapters such as LoRA: what they train, merged, saved and loaded."""
