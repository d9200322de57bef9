"""A release behind HTTP: class and certified radius, or ABSTAIN, by fresh noise."""
