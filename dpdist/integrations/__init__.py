"""Private training inside the trainers of other libraries; each needs its own extra."""
