"""What people type; one file for each kind of wish."""
