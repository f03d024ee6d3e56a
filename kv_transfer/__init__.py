"""Moves paged KV between workers: `protocol` decides (pure), `transport` moves bytes, `checksum` proves them."""
