"""The push protocol, pure: messages and their encoding, sender and receiver state machines, layout and plan."""
