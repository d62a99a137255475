"""What the CUDA backends share: device facts, compilation, launching."""
