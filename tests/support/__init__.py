"""What several tests share: the real training, search and certification in this process, and a
recorder of every secret key they use."""
