"""A model that is named on the command line: its inputs, its findings, the standard checks, and a file of tests."""
