"""Which tests use what differs between two sides, by the names in files: the others do not run again."""
