"""Which layers a metric depends on: each is replaced by zeros in turn."""
