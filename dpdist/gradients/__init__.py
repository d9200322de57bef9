"""How a private gradient is made: sampled, perturbed, clipped, summed, noised. Torch; never ray."""
