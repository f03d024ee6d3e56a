"""The prefill worker: its profile and its process entry."""
