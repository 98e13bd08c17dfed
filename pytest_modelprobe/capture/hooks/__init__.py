"""Hooks of each kind: on modules, on tensors, on parameters, on functions of torch; and the guard that they run in.

These are the places where torch calls the capture. Each hook hands on what it sees and computes nothing itself, so that
the fragile part of torch's hooks is here, and what is computed is elsewhere. No module has a full backward hook: that
breaks ``ReLU(inplace=True)``, is not called for outputs in a dict or dataclass, and costs four times as much.
"""
