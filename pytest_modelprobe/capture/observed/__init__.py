"""What is observed of a call: its tensors, parameters, units, random draws and attributes; and which calls run now."""
