"""What all checks use: trials and their traces, comparison, masks, and evidence of what a model is meant for.

The modules beside this folder are the checks themselves, one for each family.
"""
