"""What makes a step need less memory: fewer bits, recomputation, offloading."""
