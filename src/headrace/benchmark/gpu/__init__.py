"""What has to be seen on a GPU, in one command: `scripts/gpu_check`."""
