"""`baton`, the command line."""
