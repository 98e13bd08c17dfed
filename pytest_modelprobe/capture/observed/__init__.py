"""What is observed of a call: its tensors, parameters, units, random draws and attributes; and which calls run now.

A tensor is reduced to numbers when it is seen, so that a watch does not keep activations alive. What is observed stays
changeable until its forward is over, because gradients arrive later.
"""
