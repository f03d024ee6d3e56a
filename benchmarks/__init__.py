"""One script a question; each prints JSON whose shape `benchmarks.report` defines."""
