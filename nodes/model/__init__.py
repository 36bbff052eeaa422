"""What knows the insides of ERNIE-Image: checkpoint files, the architecture read from shapes, storage, the build."""
