"""`modelprobe_snapshot`: a record is as it was, or the failure says what changed. One room a concern."""
