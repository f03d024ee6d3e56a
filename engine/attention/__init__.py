"""Paged attention, one backend each: the native CPU kernels and the torch reference. The pool they read lives here too."""
