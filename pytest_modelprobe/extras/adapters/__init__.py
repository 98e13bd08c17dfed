"""Adapters of a frozen model, such as LoRA: what they train, that they are merged, saved and loaded."""
