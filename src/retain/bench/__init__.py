"""What `retain bench` runs. Benchmarks measure; they assert nothing."""
