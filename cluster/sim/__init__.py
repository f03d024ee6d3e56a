"""Discrete-event simulator of a whole cluster: the pure machines unchanged, everything around them simulated.

`kernel` keeps virtual time, `process` and `network` are machines that crash, pause and lose their connections,
`kv_memory`, `transport` and `engine_model` stand in for KV pools, the push transport and the model runner, the `*_node`
modules drive the real state machines, `scenario` and `faults` say what happens in a history, `checks` judges it.
`python -m cluster.sim --seed N --trace` replays one history.
"""
