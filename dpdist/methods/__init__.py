"""Published systems, one class each, composed of the blocks in gradients/ and models/."""
