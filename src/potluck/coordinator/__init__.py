"""Choose: load → decide → record → tell. One use-case a file; metadata only, no prompt or answer."""
