"""Parts of the goodput benchmark: traces, load, limits, bisection, intervals, pictures."""
