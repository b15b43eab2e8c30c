"""The bus on NATS: its server, the right to use it, and one process's connection."""
