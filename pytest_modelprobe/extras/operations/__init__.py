"""The first operation of a layer whose result differs between two models, with its line of source."""
