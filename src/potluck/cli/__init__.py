"""Start: the commands people type, and the composition roots of each process."""
