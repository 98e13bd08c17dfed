"""What all checks use: prepared models, traces of their runs, comparison, masks, and what a model is meant for.

The modules beside this folder are the checks themselves, one for each family.
"""
