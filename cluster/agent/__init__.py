"""The worker's side of the cluster: WorkerState, a pure state machine, and the shell around it."""
