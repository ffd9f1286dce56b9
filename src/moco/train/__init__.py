"""The loop, and the run folder that everything else reads."""
