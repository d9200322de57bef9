"""The command line; a command imports heavy libraries only when it runs."""
