"""Rotary position embedding (RoPE): tables of angles, and the rotation and its gradient."""
