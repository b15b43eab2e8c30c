"""Choose: load → decide → record → tell. One use-case a file; no prompt or answer is seen here."""
