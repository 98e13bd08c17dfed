"""What only some captures look at: attention, functional calls, costs, checkpoints, compiled code, a stop."""
