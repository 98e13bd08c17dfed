"""Figures: feature maps, where a model looks, gradients by depth, and distributions side by side."""
