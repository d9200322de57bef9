"""Secret randomness: keys, keystreams, device generators, and the location of a model's noise."""
