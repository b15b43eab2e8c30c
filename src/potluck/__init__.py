"""Potluck pools the GPUs that people already own, and serves the pool as one machine."""

__version__ = "0.1.0"
