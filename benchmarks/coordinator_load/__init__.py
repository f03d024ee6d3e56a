"""What benchmarks/coordinator.py is made of besides the script."""
