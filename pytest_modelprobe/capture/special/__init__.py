"""What only some captures look at: attention, functional calls, costs, checkpoints, compiled code, a stop.

Each costs more than statistics do, or changes how the model runs, and so is done only if an option asks for it. The
exception is activation checkpointing, which the model decides on.
"""
