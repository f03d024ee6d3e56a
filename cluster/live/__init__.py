"""The live cluster: Ray actors and plain processes, the driver that feeds ClusterState, starting and stopping."""
