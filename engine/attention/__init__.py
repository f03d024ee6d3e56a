"""Paged attention and the block pool it reads. One backend each: native CPU kernels, torch reference."""
