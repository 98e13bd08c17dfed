"""The call of a layer that differs, as one file: ``--modelprobe-save`` writes it, `modelprobe replay` runs it again."""
