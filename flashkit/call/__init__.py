"""From the arguments of attention() to a problem and its operands, and back to the caller's shapes."""
