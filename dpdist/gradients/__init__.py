"""Private gradients: sampled, perturbed, clipped, summed and noised; torch, never Ray."""
