"""`modelprobe_snapshot`: compare a record with files, and report what changed. Import the modules, not the names."""
