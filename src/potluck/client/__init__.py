"""Ask: the Python SDK. It speaks HTTP only."""
