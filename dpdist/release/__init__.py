"""A release: what somebody else needs to use a model, and to hold its statements against it."""
