"""The life of a request, free of sockets: the simulator drives it as it is."""
