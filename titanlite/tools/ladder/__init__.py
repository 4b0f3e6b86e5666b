"""Command: train a ladder of sizes, fit a scaling law to their losses, and predict the loss of a larger run."""
