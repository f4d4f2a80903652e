"""Pictures in: opened upright and in colour, and made into the pixels that a checkpoint was trained on."""
