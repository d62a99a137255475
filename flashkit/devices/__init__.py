"""What flashkit knows of the machine: facts, profiles, the IO model, the kernel cache."""
