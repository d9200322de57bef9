"""Methods that only reproductions of papers need: recipes name them, and nobody imports them."""
