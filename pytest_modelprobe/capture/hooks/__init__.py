"""Hooks of each kind: on modules, on tensors, on parameters, on functions of torch; and the guard that they run in.

They are the only code that torch calls. Each hands on what it sees and computes nothing itself.
"""
