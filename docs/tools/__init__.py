"""What the site is made with: the order of its pages, and the reference from the code."""
