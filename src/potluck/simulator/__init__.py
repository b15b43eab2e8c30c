"""Imagine: the real gateway, coordinator and agents on virtual time and a faulty network."""
