"""From the arguments of attention() to a Problem, and back."""
