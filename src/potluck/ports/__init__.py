"""Needs: what the rooms ask of the world, as Protocols. Real ones stand in `adapters`."""
