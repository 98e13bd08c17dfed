"""What training keeps: resumed, loaded and deferred states of models, and what was the same in each step of a run."""
