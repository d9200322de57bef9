"""One file per published system: short compositions of the blocks in gradients/ and models/."""
