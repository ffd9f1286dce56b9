"""What people look at, made from a run folder."""
