"""Private training inside the trainers of other libraries, each an extra of its own."""
