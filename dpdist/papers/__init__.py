"""Methods for reproducing papers only: recipes name them, and no other module imports them."""
