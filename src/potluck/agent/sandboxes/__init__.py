"""What confines it: argv and policy only; adapters spawn."""
