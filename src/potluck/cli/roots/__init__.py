"""Composition roots: each process of a pool is put together here, and nowhere else."""
