"""What slots are: the sizes of caches, the dtypes of pools, where tokens go, which slots are evicted first."""
