"""Mutation testing: run the tests again with faults planted in the models, and tell which of them no test notices."""
