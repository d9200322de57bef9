"""Make the site: the order of its pages, and the reference from the code."""
