"""In: requests come in by HTTP and leave for nodes as grants and words on the wire."""
