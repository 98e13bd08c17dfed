"""Forwards, backward passes and steps of optimizers: what belongs together, and what is merged."""
