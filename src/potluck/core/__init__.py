"""Rules. Pure functions over small values: no clock, no chance, no I/O, no logging."""
