"""The halves of `benchmarks/kv_push.py`: ends of wires in processes of their own, and what is made of their times."""
