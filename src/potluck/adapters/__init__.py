"""Touch: the real things behind the ports."""
