"""The benchmark of training with a stock trainer, data loader included."""
