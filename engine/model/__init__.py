"""Models: configuration, weights, layers, sampler and importer. Nothing here knows of requests or of other workers."""
