"""One-sided transports: `base` is the contract, every other module one backend."""
