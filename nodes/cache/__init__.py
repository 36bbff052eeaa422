"""The step cache: which steps of a sampling run are computed, and what stands in for the others."""
