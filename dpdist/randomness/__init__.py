"""Where secret random numbers come from: keys and units."""
