"""The decode worker: its profile and its process entry."""
