"""Where rank 0 of a group publishes its address."""
