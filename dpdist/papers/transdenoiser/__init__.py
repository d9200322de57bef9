"""TransDenoiser: a private denoiser before a public classifier."""
