"""Words on the wire: subjects, the envelope, and every message's shape."""
