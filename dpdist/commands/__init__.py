"""One module per command of the CLI; each imports heavy libraries only when it runs."""
