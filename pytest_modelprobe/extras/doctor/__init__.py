"""`modelprobe doctor`: versions, devices and what is switched off, for a bug report."""
