"""`modelprobe bisect`: the commit that changed what the model of a test does."""
