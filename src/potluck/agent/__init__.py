"""Do: the provider's machine."""
