"""Training: the loop, its config, checkpoints and data order; recipes/ has one file per objective."""
