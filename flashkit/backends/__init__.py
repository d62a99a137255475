"""One folder a backend; each is found by an entry point of the group `flashkit.backends`."""
