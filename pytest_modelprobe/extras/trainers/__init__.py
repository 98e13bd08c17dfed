"""Callbacks for training runs: every N steps the record of one step, as JSON and as scalars of TensorBoard.

Each class has a module, which is imported when it is asked for: its base class is of a library that may be missing.
"""
