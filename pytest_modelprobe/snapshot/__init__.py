"""`modelprobe_snapshot`: compare a record with files, and report what changed.

Other rooms import the modules directly. Every run of pytest loads `options` and `session`, and only a test with a
snapshot needs the others, so nothing is imported here.
"""
